//! Stages of about equal work.

use std::collections::BTreeMap;

use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::quantization::PackedPart;

/// The work before the units, of each unit, and behind the units, per row of activations: the
/// elements of the matrices that multiply the row. Of experts the matrices of one row count.
/// Embeddings count nothing, since they only look rows up.
pub(super) fn work(tree: &ModuleTree, units: usize) -> Vec<f64> {
    let of_experts: BTreeMap<String, f64> = tree
        .experts()
        .iter()
        .flat_map(|experts| {
            let part = experts.per_row() as f64 / experts.count().max(1) as f64;
            experts.parameters().into_iter().map(move |p| (p.fqn().to_owned(), part))
        })
        .collect();
    let mut work = vec![0.0; units + 2];
    for (index, parameter) in tree.parameters().iter().enumerate() {
        let name = parameter.fqn();
        let is_embedding = parameter.is_embedding_or_head();
        let packed = parameter.packed();
        let shape = packed.map_or(parameter.global_shape(), |packed| &packed.shape[..]);
        let is_scales = packed.is_some_and(|packed| packed.part == PackedPart::Scales);
        if shape.len() < 2 || is_scales {
            continue;
        }
        let elements = shape.iter().product::<usize>() as f64;
        let elements = elements * of_experts.get(name).copied().unwrap_or(1.0);
        for part in tree.parts_of(index) {
            // A tied head multiplies by the matrix that the embedding looks rows up in.
            if !(is_embedding && part == 0) {
                work[part] += elements;
            }
        }
    }
    work
}

/// The numbers of units of `stages` consecutive stages, at least one each, so that the stage with
/// the most work has as little as possible, and the others are as even as that allows. `None` if
/// there are fewer units than stages.
pub(super) fn balanced(stages: usize, work: &[f64]) -> Option<Vec<usize>> {
    let units = work.len().checked_sub(2)?;
    if stages == 0 || units < stages {
        return None;
    }
    let mut before = vec![0.0];
    for unit in &work[1..=units] {
        before.push(before[before.len() - 1] + unit);
    }
    let of_stage = |stage: usize, first: usize, end: usize| {
        let own = before[end] - before[first];
        let first_has = if stage == 0 { work[0] } else { 0.0 };
        own + first_has + if stage + 1 == stages { work[units + 1] } else { 0.0 }
    };
    // For each number of units of the stages so far: the least of a cost, and the start of the last
    // stage.
    let best = |combine: &dyn Fn(f64, f64) -> f64| {
        let mut rows = vec![vec![(f64::INFINITY, 0); units + 1]; stages + 1];
        rows[0][0] = (0.0, 0);
        for stage in 0..stages {
            for end in stage + 1..=units {
                for first in stage..end {
                    let cost = combine(rows[stage][first].0, of_stage(stage, first, end));
                    if cost < rows[stage + 1][end].0 {
                        rows[stage + 1][end] = (cost, first);
                    }
                }
            }
        }
        rows
    };
    let most = best(&|so_far, own| so_far.max(own))[stages][units].0;
    let limit = most * (1.0 + 1e-9);
    let even = |so_far: f64, own: f64| if own > limit { f64::INFINITY } else { so_far + own * own };
    let rows = best(&even);
    let (mut counts, mut end) = (vec![0; stages], units);
    for stage in (0..stages).rev() {
        let first = rows[stage + 1][end].1;
        (counts[stage], end) = (end - first, first);
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use fulgurite_core::module::{ModuleBuilder, ModuleInit, Quantization};
    use fulgurite_core::quantization::WeightFormat;
    use fulgurite_models::{Decoder, ModelConfig};

    use super::*;

    fn of(stages: usize, work: &[f64]) -> Vec<usize> {
        balanced(stages, work).unwrap()
    }

    #[test]
    fn heads_take_the_place_of_units() {
        let work = |units: usize, head: f64| [&[0.0][..], &vec![1.0; units], &[head]].concat();
        assert_eq!(of(4, &work(32, 2.4)), [8, 9, 9, 6]);
        assert_eq!(of(2, &work(8, 0.0)), [4, 4]);
        assert_eq!(of(2, &work(8, 20.0)), [7, 1]);
        assert_eq!(of(3, &work(3, 9.0)), [1, 1, 1]);
        assert_eq!(balanced(4, &work(3, 0.0)), None);
    }

    #[test]
    fn packed_weights_count_once() {
        let mut config: ModelConfig = toml::from_str(
            "type = 'llama'
            vocab_size = 32
            hidden_size = 16
            intermediate_size = 24
            num_hidden_layers = 2
            num_attention_heads = 2",
        )
        .unwrap();
        let config = config.decoder().unwrap();
        let of = |quantization: Option<Quantization>| {
            let frozen = vec!["layers.*".to_owned()];
            let init = ModuleInit { quantization, frozen, ..ModuleInit::default() };
            let b = ModuleBuilder::new(init);
            Decoder::new(&config, &b).unwrap();
            work(&b.finish().unwrap(), 2)
        };
        let layer = f64::from(16 * (4 * 16 + 3 * 24));
        assert_eq!(of(None), [0.0, layer, layer, f64::from(32 * 16)]);
        assert_eq!(of(Some(Quantization::new(WeightFormat::Int8))), of(None));
    }

    #[test]
    fn no_other_split_has_a_smaller_largest_stage() {
        for trial in 0..200 {
            let (units, stages) = (3 + trial % 5, 3);
            let some = |i: usize| (trial * 7919 + i * i * 104_729 + i * 31) % 20;
            let work: Vec<f64> = (0..units + 2).map(|i| some(i) as f64).collect();
            let largest = |counts: [usize; 3]| {
                let cuts = [0, counts[0], counts[0] + counts[1], units];
                let stage = |i: usize| -> f64 {
                    let own: f64 = work[1 + cuts[i]..1 + cuts[i + 1]].iter().sum();
                    own + if i == 0 { work[0] } else { 0.0 }
                        + if i == 2 { work[units + 1] } else { 0.0 }
                };
                stage(0).max(stage(1)).max(stage(2))
            };
            let all =
                (1..units - 1).flat_map(|a| (1..units - a).map(move |b| [a, b, units - a - b]));
            let least = all.map(largest).fold(f64::INFINITY, f64::min);
            let found: [usize; 3] = of(stages, &work).try_into().unwrap();
            assert!((largest(found) - least).abs() < 1e-9, "{work:?}: {found:?}");
        }
    }
}
