//! Steps of a GRU and an LSTM against their formulas in f64.

use fulgurite_kernels::plans::{
    States, Step, StepBackward, gru_step, gru_step_backward, lstm_step, lstm_step_backward,
};

use crate::numbers::normal;
use crate::shim::Machine;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn close(name: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= 2e-6 * expected.abs().max(1.0), "{name}[{i}] is {found}, not {expected}");
    }
}

/// One element of a step: the sums of the gates, the product for the new gate, and the state.
struct Unit {
    sums: [f64; 4],
    of_new: f64,
    before: f64,
}

impl Unit {
    /// The gates, what is kept, and the hidden state.
    fn forward(&self, lstm: bool) -> (Vec<f64>, f64, f64) {
        let [a, b, c, d] = self.sums;
        if lstm {
            let gates = vec![sigmoid(a), sigmoid(b), c.tanh(), sigmoid(d)];
            let cell = gates[1] * self.before + gates[0] * gates[2];
            let hidden = gates[3] * cell.tanh();
            (gates, cell, hidden)
        } else {
            let (reset, update) = (sigmoid(a), sigmoid(b));
            let new = (c + reset * self.of_new).tanh();
            let hidden = new + update * (self.before - new);
            (vec![reset, update, new], self.of_new, hidden)
        }
    }
}

#[test]
fn steps_have_their_formulas_and_gradients() {
    for (lstm, batch, width, with_bias) in
        [(false, 3, 5, true), (true, 3, 5, true), (false, 130, 70, false), (true, 130, 70, false)]
    {
        let (gates, n) = (if lstm { 4 } else { 3 }, batch * width);
        let of = States { batch: batch as u64, width: width as u64 };
        let [inputs, product] = ["inputs", "product"].map(|what| normal::<f32>(what, gates * n));
        let bias = normal::<f32>("bias", gates * width);
        let [before, grad, of_hidden, of_cell] =
            ["before", "grad", "of_hidden", "of_cell"].map(|what| normal::<f32>(what, n));
        let mut m = Machine::default();
        let step = Step {
            gates: m.put(&inputs),
            product: m.put(&product),
            bias: if with_bias { m.put(&bias) } else { 0 },
            before: m.put(&before),
            kept: m.garbage::<f32>(n),
            hidden: m.garbage::<f32>(n),
        };
        m.run(&if lstm { lstm_step(of, step) } else { gru_step(of, step) });
        let at = |i: usize, gate: usize| i / width * gates * width + gate * width + i % width;
        let unit = |i: usize| {
            let of_hidden = |gate: usize| {
                let own = if with_bias { f64::from(bias[gate * width + i % width]) } else { 0.0 };
                f64::from(product[at(i, gate)]) + own
            };
            let mut sums = [0.0; 4];
            for (gate, sum) in sums.iter_mut().enumerate().take(gates) {
                let apart = !lstm && gate == 2;
                *sum = f64::from(inputs[at(i, gate)]) + if apart { 0.0 } else { of_hidden(gate) };
            }
            Unit { sums, of_new: of_hidden(2), before: f64::from(before[i]) }
        };
        let (mut wanted, mut kept, mut hidden) = (vec![0.0; gates * n], Vec::new(), Vec::new());
        for i in 0..n {
            let (of_unit, keeps, shown) = unit(i).forward(lstm);
            for (gate, value) in of_unit.into_iter().enumerate() {
                wanted[at(i, gate)] = value;
            }
            kept.push(keeps);
            hidden.push(shown);
        }
        close("gates", &m.get(step.gates), &wanted);
        close("kept", &m.get(step.kept), &kept);
        close("hidden", &m.get(step.hidden), &hidden);

        let backward = StepBackward {
            gates: step.gates,
            before: step.before,
            kept: step.kept,
            grad: m.put(&grad),
            of_hidden: m.put(&of_hidden),
            inputs: m.garbage::<f32>(gates * n),
            other: if lstm { m.put(&of_cell) } else { m.garbage::<f32>(gates * n) },
        };
        m.run(&match lstm {
            true => lstm_step_backward(of, backward),
            false => gru_step_backward(of, backward),
        });
        // Central differences of what the gradients are of: the hidden state, and the cell state.
        let loss = |i: usize, unit: &Unit| {
            let (_, cell, shown) = unit.forward(lstm);
            let of_shown = f64::from(grad[i]) + f64::from(of_hidden[i]);
            of_shown * shown + if lstm { f64::from(of_cell[i]) * cell } else { 0.0 }
        };
        let slope = |i: usize, change: &dyn Fn(&mut Unit, f64)| {
            let at = |by: f64| {
                let mut unit = unit(i);
                change(&mut unit, by);
                loss(i, &unit)
            };
            (at(1e-5) - at(-1e-5)) / 2e-5
        };
        let (mut of_inputs, mut of_products) = (vec![0.0; gates * n], vec![0.0; gates * n]);
        for i in 0..n {
            for gate in 0..gates {
                of_inputs[at(i, gate)] = slope(i, &|unit, by| unit.sums[gate] += by);
                of_products[at(i, gate)] = match (lstm, gate) {
                    (false, 2) => slope(i, &|unit, by| unit.of_new += by),
                    _ => of_inputs[at(i, gate)],
                };
            }
        }
        let of_before: Vec<f64> = (0..n).map(|i| slope(i, &|unit, by| unit.before += by)).collect();
        close("of inputs", &m.get(backward.inputs), &of_inputs);
        if lstm {
            close("of the cell before", &m.get(backward.other), &of_before);
        } else {
            close("of products", &m.get(backward.other), &of_products);
            close("of the state before", &m.get(backward.of_hidden), &of_before);
        }
    }
}
