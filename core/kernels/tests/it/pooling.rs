//! Pooling against its definition.

use std::ops::Range;

use fulgurite_kernels::plans::{
    Pooling, max_pool, max_pool_backward, mean_pool, mean_pool_backward,
};

use crate::numbers::normal;
use crate::shim::Machine;

/// The windows' rows and columns.
type Windows = [Vec<Range<usize>>; 2];

/// Windows of a size at a distance, over an input with padding.
fn sliding(input: usize, [kernel, stride, padding]: [usize; 3]) -> Vec<Range<usize>> {
    (0..=input + 2 * padding - kernel)
        .step_by(stride)
        .map(|start| start.saturating_sub(padding)..(start + kernel - padding).min(input))
        .collect()
}

/// Windows that share an input evenly.
fn adaptive(input: usize, output: usize) -> Vec<Range<usize>> {
    (0..output).map(|i| i * input / output..((i + 1) * input).div_ceil(output)).collect()
}

struct Case {
    planes: usize,
    inputs: [usize; 2],
    windows: Windows,
}

impl Case {
    fn plan(&self, m: &mut Machine) -> Pooling {
        let (mut windows, mut covers) = (Vec::new(), Vec::new());
        for (ranges, input) in self.windows.iter().zip(self.inputs) {
            windows.extend(ranges.iter().map(|range| range.start as u32));
            windows.extend(ranges.iter().map(|range| range.end as u32));
            let first =
                |at: usize| ranges.iter().position(|range| at < range.end).unwrap_or(ranges.len());
            let end = |at: usize| ranges.iter().take_while(|range| range.start <= at).count();
            covers.extend((0..input).map(|at| first(at) as u32));
            covers.extend((0..input).map(|at| end(at) as u32));
        }
        Pooling {
            planes: self.planes as u64,
            outputs: [0, 1].map(|dim| self.windows[dim].len() as u32),
            inputs: self.inputs.map(|size| size as u32),
            windows: m.put(&windows),
            covers: m.put(&covers),
        }
    }

    /// The elements of each window of a plane.
    fn areas(&self) -> Vec<Vec<usize>> {
        let [rows, columns] = &self.windows;
        let area = |rows: &Range<usize>, columns: &Range<usize>| -> Vec<usize> {
            let of_row = |row| columns.clone().map(move |column| (row, column));
            rows.clone().flat_map(of_row).map(|(r, c)| r * self.inputs[1] + c).collect()
        };
        rows.iter().flat_map(|r| columns.iter().map(move |c| area(r, c))).collect()
    }
}

fn cases() -> Vec<Case> {
    let case = |planes, inputs: [usize; 2], windows| Case { planes, inputs, windows };
    vec![
        case(3, [7, 5], [sliding(7, [3, 2, 1]), sliding(5, [2, 2, 0])]),
        // Gaps between windows, and columns that none has.
        case(2, [8, 9], [sliding(8, [2, 3, 0]), sliding(9, [2, 4, 1])]),
        case(5, [6, 11], [adaptive(6, 4), adaptive(11, 3)]),
        case(1, [2, 3], [adaptive(2, 5), adaptive(3, 3)]),
        // More than one block.
        case(300, [6, 6], [sliding(6, [3, 1, 1]), sliding(6, [3, 1, 1])]),
    ]
}

#[test]
fn largest_elements_and_their_gradients() {
    for case in cases() {
        let (inputs, areas) = (case.inputs[0] * case.inputs[1], case.areas());
        let outputs = case.planes * areas.len();
        let mut x = normal::<f32>("x", case.planes * inputs);
        // Equal elements, of which the first counts.
        x.iter_mut().for_each(|x| *x = (*x * 2.0).round());
        let grad = normal::<f32>("grad", outputs);
        let mut m = Machine::default();
        let of = case.plan(&mut m);
        let [x_at, grad_at] = [&x, &grad].map(|values| m.put(values));
        let (y, picked) = (m.garbage::<f32>(outputs), m.garbage::<u32>(outputs));
        let dx = m.garbage::<f32>(x.len());
        m.run(&max_pool(&of, x_at, y, picked));
        m.run(&max_pool_backward(&of, picked, grad_at, dx));
        let (mut expected, mut places) = (Vec::new(), Vec::new());
        let mut expected_dx = vec![0f32; x.len()];
        for plane in 0..case.planes {
            for area in &areas {
                let value = |at: usize| x[plane * inputs + at];
                let largest =
                    area.iter().copied().reduce(|a, b| if value(b) > value(a) { b } else { a });
                let at = largest.unwrap();
                expected_dx[plane * inputs + at] += grad[expected.len()];
                expected.push(value(at));
                places.push(at as u32);
            }
        }
        assert_eq!(m.get::<f32>(y), expected);
        assert_eq!(m.get::<u32>(picked), places);
        assert_eq!(m.get::<f32>(dx), expected_dx);
    }
}

#[test]
fn a_nan_is_the_largest() {
    let case = Case { planes: 1, inputs: [1, 4], windows: [adaptive(1, 1), adaptive(4, 2)] };
    let mut m = Machine::default();
    let of = case.plan(&mut m);
    let x = m.put(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    let (y, picked) = (m.garbage::<f32>(2), m.garbage::<u32>(2));
    m.run(&max_pool(&of, x, y, picked));
    let found = m.get::<f32>(y);
    assert!(found[0].is_nan() && found[1] == f32::NEG_INFINITY, "{found:?}");
    assert_eq!(m.get::<u32>(picked), [0, 2]);
}

#[test]
fn means_and_their_gradients() {
    for case in cases() {
        for divisor in [None, Some(7)] {
            let (inputs, areas) = (case.inputs[0] * case.inputs[1], case.areas());
            let outputs = case.planes * areas.len();
            let x = normal::<f32>("x", case.planes * inputs);
            let grad = normal::<f32>("grad", outputs);
            let mut m = Machine::default();
            let of = case.plan(&mut m);
            let [x_at, grad_at] = [&x, &grad].map(|values| m.put(values));
            let (y, dx) = (m.garbage::<f32>(outputs), m.garbage::<f32>(x.len()));
            m.run(&mean_pool(&of, divisor, x_at, y));
            m.run(&mean_pool_backward(&of, divisor, grad_at, dx));
            // The sums of the CPU's loop, in its order.
            let (mut expected, mut expected_dx) = (Vec::new(), vec![0f32; x.len()]);
            for plane in 0..case.planes {
                for area in &areas {
                    let elements = divisor.map_or(area.len(), |divisor| divisor as usize);
                    let factor = (1.0 / elements as f64) as f32;
                    let part = grad[expected.len()] * factor;
                    area.iter().for_each(|at| expected_dx[plane * inputs + at] += part);
                    let sum = area.iter().fold(0f32, |sum, at| sum + x[plane * inputs + at]);
                    expected.push(sum * factor);
                }
            }
            assert_eq!(m.get::<f32>(y), expected);
            assert_eq!(m.get::<f32>(dx), expected_dx);
        }
    }
}
