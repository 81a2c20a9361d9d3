//! [`PeftAdapter`]: a run's adapter under the names that PEFT finds in a model of `transformers`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{ADAPTER_CONFIG, AdapterSource, TensorSource, write_adapter};
use fulgurite_engine::module::expert_stack;
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::{ModelConfig, OF_MODULES, resolve};
use crate::weights::{View, WeightLayout};

/// The ends of an adapter's tensors, after the layer's path.
const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
const MAGNITUDE: &str = "lora_magnitude_vector";

/// A layer of a file, and the model's layers that it is made of, by their weights.
type Parts = Vec<(String, View)>;

/// A run's adapter that can be written under the names of `transformers`.
///
/// Layers that are fused there get one pair of matrices. Unless the adapters of all parts have one
/// first matrix, the pair has the sum of their ranks, and blocks in the second matrix. Then
/// `rank_pattern` and `alpha_pattern` have the layer.
pub struct PeftAdapter {
    source: AdapterSource,
    layout: WeightLayout,
    /// The base that the caller has named.
    base: Option<PathBuf>,
}

/// What [`PeftAdapter::write`] has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PeftWritten {
    /// The directory.
    pub path: PathBuf,
    /// Layers with an adapter.
    pub layers: usize,
    /// Layers that are fused of several of the model's.
    pub fused: usize,
    /// Whether a layer has another name for PEFT.
    pub is_renamed: bool,
}

impl PeftAdapter {
    /// Opens the adapter in a directory. Only `config.json` of the base is read: in the directory
    /// `base`, or where `adapter_config.json` says.
    ///
    /// # Errors
    /// If there is no adapter. If its base is missing, or of an unknown family.
    pub fn open(directory: &Path, base: Option<&Path>) -> Result<Self> {
        let source = AdapterSource::open(directory)?;
        let named = source.config().base_model_name_or_path.as_deref();
        let given = base.map(Path::to_owned);
        let base = base_directory(directory, base, named)?;
        let mut config = ModelConfig::default();
        config.start_from(&base);
        let wrong = |error: Error| error.during(format_args!("reading {}", base.display()));
        config.read_file().map_err(wrong)?;
        let class = config.file().and_then(|(_, keys)| keys.get("architectures")?.get(0).cloned());
        let description = config.describe_for(OF_MODULES).map_err(wrong)?;
        let names_tokens = |class: &Value| {
            class.as_str().is_some_and(|class| class.ends_with("ForTokenClassification"))
        };
        let module = match source.config().task_type.as_deref() {
            Some("TOKEN_CLS") => "token_classification",
            None if class.is_some_and(|class| names_tokens(&class)) => "token_classification",
            _ => "",
        };
        Ok(Self { layout: description.weights_of(module), source, base: given })
    }

    /// Writes the directory, whose files are replaced. Not collective.
    ///
    /// # Errors
    /// If only some parts of a fused layer have magnitudes, biases or trained weights, which PEFT
    /// has once for the layer. If an expert has an adapter, ranks differ, a tensor is damaged, or a
    /// file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<PeftWritten> {
        let mut written = Written::default();
        for (layer, parts) in self.layers()? {
            written.layers.insert(layer.clone());
            written.is_renamed |= parts.len() > 1 || path(&parts[0].0) != layer;
            match &parts[..] {
                [(weight, view)] => self.rename(weight, &layer, *view, &mut written)?,
                parts => self.fuse(&layer, parts, &mut written)?,
            }
        }
        let others: Vec<&str> = self.source.others().collect();
        for name in others {
            self.other(name, &mut written)?;
        }
        let config = self.config(&written)?;
        write_adapter(directory, &written.tensors, &config)?;
        let Written { layers, fused, is_renamed, .. } = written;
        Ok(PeftWritten { path: directory.to_owned(), layers: layers.len(), fused, is_renamed })
    }

    /// The file's layers that have adapters, with all their parts.
    fn layers(&self) -> Result<BTreeMap<String, Parts>> {
        let mut layers = BTreeMap::new();
        let names = self.source.names();
        let of_layer = names.iter().filter_map(|name| name.find(".lora_").map(|at| &name[..at]));
        for layer in of_layer.collect::<BTreeSet<_>>() {
            let weight = format!("{layer}.weight");
            if expert_stack(layer).is_some() {
                return self.fail(format!(
                    "has an adapter of `{layer}`, an expert; PEFT finds those of some models under the names that they \
                     have here: load the directory as it is, or merge it (`--to hugging-face --adapter DIR`)"
                ));
            }
            let (file, parts) = self.layout.of_model(&weight);
            layers.insert(path(&file).to_owned(), parts);
        }
        Ok(layers)
    }

    /// Takes over the tensors of a layer that is one in the file.
    fn rename(&self, weight: &str, layer: &str, view: View, written: &mut Written) -> Result<()> {
        let own = path(weight);
        let begin = format!("{own}.lora_");
        for name in self.source.names() {
            if name.starts_with(&begin) {
                written.put(format!("{layer}{}", &name[own.len()..]), self.read(name)?);
            }
        }
        written.transposed |= view.transposed;
        Ok(())
    }

    /// Joins the adapters of a fused layer's parts.
    fn fuse(&self, layer: &str, parts: &[(String, View)], written: &mut Written) -> Result<()> {
        let of = |weight: &str, end: &str| format!("{}.{end}", path(weight));
        let config = self.source.config();
        let mut pairs = Vec::new();
        for (weight, view) in parts {
            let [a, b] = MATRICES.map(|end| of(weight, end));
            let pair = match self.source.info(&a) {
                Some(_) => Some((self.read(&a)?, self.read(&b)?)),
                None => None,
            };
            if let Some((a, _)) = pair.as_ref().filter(|(a, _)| a.dims()[0] != config.r) {
                return self.fail(format!(
                    "has an adapter of rank {} for `{}`, a part of `{layer}`, and its configuration says {}",
                    a.dims()[0],
                    path(weight),
                    config.r
                ));
            }
            pairs.push((pair, *view));
        }
        let first: Vec<&Tensor> =
            pairs.iter().filter_map(|(pair, _)| Some(&pair.as_ref()?.0)).collect();
        let shares = first.len() == parts.len() && all_equal(&first)?;
        let (a, blocks) =
            if shares { (first[0].clone(), 1) } else { (Tensor::cat(&first, 0)?, first.len()) };
        let rank = config.r;
        let mut at = 0;
        let mut rows = Rows::default();
        for (pair, view) in &pairs {
            let b = match pair {
                None => {
                    let rows =
                        view.rows_in_file().iter().flatten().map(ExactSizeIterator::len).sum();
                    Tensor::zeros((rows, rank * blocks), DType::F32, &Device::Cpu)?
                }
                Some((_, b)) if shares => b.clone(),
                Some((_, b)) => {
                    let block = b.pad_with_zeros(1, at, rank * blocks - at - rank)?;
                    at += rank;
                    block
                }
            };
            rows.put(*view, &b)?;
        }
        if blocks > 1 {
            let factor = if config.use_rslora { (blocks as f64).sqrt() } else { blocks as f64 };
            written.patterns.push((layer.to_owned(), rank * blocks, config.lora_alpha * factor));
        }
        let [a_name, b_name] = MATRICES.map(|end| format!("{layer}.{end}"));
        written.put(a_name, a);
        written.put(b_name, rows.joined()?);
        let magnitudes: Vec<_> =
            parts.iter().map(|(weight, view)| (of(weight, MAGNITUDE), *view)).collect();
        if magnitudes.iter().any(|(name, _)| self.source.info(name).is_some()) {
            let magnitude = self.whole(&magnitudes, &format!("{layer}.{MAGNITUDE}"))?;
            written.put(format!("{layer}.{MAGNITUDE}"), magnitude);
        }
        written.transposed |= parts.iter().any(|(_, view)| view.transposed);
        written.fused += 1;
        Ok(())
    }

    /// Takes over a tensor outside of adapters: a bias, or one of a module that was trained whole.
    fn other(&self, name: &str, written: &mut Written) -> Result<()> {
        let (file, parts) = self.layout.of_model(name);
        if written.others.contains(&file) {
            return Ok(());
        }
        let mut values = match &parts[..] {
            [_] => self.read(name)?,
            parts => self.whole(parts, &file)?,
        };
        if values.rank() == 2 && parts.iter().any(|(_, view)| view.transposed) {
            values = values.t()?.contiguous()?;
        }
        // PEFT keeps an adapted layer one level deeper.
        let in_file =
            match file.strip_suffix(".bias").filter(|layer| written.layers.contains(*layer)) {
                Some(layer) => format!("{layer}.base_layer.bias"),
                None => file.clone(),
            };
        written.put(in_file, values);
        if name != file {
            written.is_renamed = true;
        }
        written.others.insert(file);
        Ok(())
    }

    /// The tensor of a file that is made of all these parts.
    fn whole(&self, parts: &[(String, View)], file: &str) -> Result<Tensor> {
        let mut rows = Rows::default();
        for (name, view) in parts {
            if self.source.info(name).is_none() {
                return self.fail(format!(
                    "has no `{name}`, which PEFT has together with others in `{file}`; train the adapter with all of \
                     them, or merge it (`checkpoint convert --to hugging-face --adapter DIR`)"
                ));
            }
            rows.put(*view, &self.read(name)?)?;
        }
        rows.joined()
    }

    /// `adapter_config.json` under the file's names.
    fn config(&self, written: &Written) -> Result<Value> {
        let mut config = serde_json::to_value(self.source.config()).map_err(Error::other)?;
        let Value::Object(keys) = &mut config else {
            return Err(Error::other(format!("{ADAPTER_CONFIG} is no table")));
        };
        if written.is_renamed {
            keys.insert("target_modules".to_owned(), json!(written.layers));
            keys.insert("exclude_modules".to_owned(), Value::Null);
            let saved = written.others.iter().filter(|name| !name.ends_with(".bias"));
            let saved: BTreeSet<&str> = saved.map(|name| path(name)).collect();
            let saved = if saved.is_empty() { Value::Null } else { json!(saved) };
            keys.insert("modules_to_save".to_owned(), saved);
        }
        if let Some(base) = &self.base {
            keys.insert("base_model_name_or_path".to_owned(), json!(base));
        }
        keys.insert("fan_in_fan_out".to_owned(), written.transposed.into());
        if !written.patterns.is_empty() {
            let ranks: BTreeMap<_, _> =
                written.patterns.iter().map(|of| (escaped(&of.0), of.1)).collect();
            let alphas: BTreeMap<_, _> =
                written.patterns.iter().map(|of| (escaped(&of.0), of.2)).collect();
            keys.insert("rank_pattern".to_owned(), json!(ranks));
            keys.insert("alpha_pattern".to_owned(), json!(alphas));
        }
        Ok(config)
    }

    fn read(&self, name: &str) -> Result<Tensor> {
        let Some(info) = self.source.info(name) else {
            return self.fail(format!("has no `{name}`"));
        };
        let region = Region::full(&info.shape);
        let values = self.source.read(name, &region, DType::F32, &Device::Cpu)?;
        Ok(values.reshape(info.shape)?)
    }

    fn fail<T>(&self, message: String) -> Result<T> {
        Err(Error::checkpoint(self.source.location(), message))
    }
}

/// The parts of a written adapter.
#[derive(Default)]
struct Written {
    tensors: HashMap<String, Tensor>,
    /// The file's layers with an adapter.
    layers: BTreeSet<String>,
    /// The file's other tensors.
    others: BTreeSet<String>,
    /// Fused layers with their ranks and alphas.
    patterns: Vec<(String, usize, f64)>,
    fused: usize,
    /// Whether a layer has another name in the file.
    is_renamed: bool,
    /// Whether an adapted layer's weight is transposed in the file.
    transposed: bool,
}

impl Written {
    fn put(&mut self, name: String, values: Tensor) {
        self.tensors.insert(name, values);
    }
}

/// Rows of a file's tensor, with the place of each piece.
#[derive(Default)]
struct Rows(Vec<(usize, Tensor)>);

impl Rows {
    /// Adds the rows of a part.
    fn put(&mut self, view: View, rows: &Tensor) -> Result<()> {
        let ranges = view.rows_in_file().unwrap_or_default();
        let needed: usize = ranges.iter().map(ExactSizeIterator::len).sum();
        if needed != rows.dims()[0] {
            return Err(Error::Config(format!(
                "a part of a fused layer has {} outputs in the adapter, and {needed} in the base; is it an adapter \
                 of this base?",
                rows.dims()[0]
            )));
        }
        let mut at = 0;
        for range in ranges {
            self.0.push((range.start, rows.narrow(0, at, range.len())?));
            at += range.len();
        }
        Ok(())
    }

    fn joined(mut self) -> Result<Tensor> {
        self.0.sort_by_key(|(start, _)| *start);
        let pieces: Vec<Tensor> = self.0.into_iter().map(|(_, rows)| rows).collect();
        Ok(Tensor::cat(&pieces, 0)?)
    }
}

/// The path of a tensor's module.
fn path(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or("", |(path, _)| path)
}

/// A path as a regular expression.
fn escaped(path: &str) -> String {
    path.replace('.', r"\.")
}

fn all_equal(tensors: &[&Tensor]) -> Result<bool> {
    let Some((first, others)) = tensors.split_first() else { return Ok(true) };
    let first = first.flatten_all()?.to_vec1::<f32>()?;
    for other in others {
        if other.flatten_all()?.to_vec1::<f32>()? != first {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The directory of an adapter's base.
///
/// # Errors
/// If it is not named, or neither a directory nor in the local Hub cache.
pub(crate) fn base_directory(
    adapter: &Path,
    given: Option<&Path>,
    named: Option<&str>,
) -> Result<PathBuf> {
    let advice = "name the directory of the base, with its config.json, by `--base DIR`";
    match (given, named) {
        (Some(given), _) => Ok(given.to_owned()),
        (None, Some(named)) => resolve(Path::new(named)).map_err(|_| {
            Error::checkpoint(
                adapter,
                format!(
                    "its base `{named}` is neither a directory nor in the local Hub cache; {advice}"
                ),
            )
        }),
        (None, None) => {
            Err(Error::checkpoint(adapter, format!("adapter_config.json names no base; {advice}")))
        }
    }
}
