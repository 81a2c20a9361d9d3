//! Generates text with the trained model.

use fulgurite::prelude::*;

use fulgurite_models::CausalLm;

const PROMPT_TOKENS: usize = 24;
const NEW_TOKENS: usize = 160;
const TEMPERATURE: f64 = 0.7;

/// Prints an excerpt of the data and its continuation by the model, at the end of a training.
pub(crate) struct Continuation;

impl Callback for Continuation {}

impl Hooks for Continuation {
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if let Some(text) = continuation(ctx)? {
            ctx.print(text);
        }
        Ok(())
    }
}

/// Returns the text to print; `None` without a tokenizer.
///
/// Collective, since a forward gathers parameters. All ranks draw the same tokens.
fn continuation(ctx: &HookContext) -> Result<Option<String>> {
    if ctx.fabric().device_mesh().pipeline().is_some() {
        return Ok(None); // no rank has the whole model
    }
    let (Some(module), Some(data)) = (ctx.module::<CausalLm>(), ctx.data_of::<CausalLm>()) else {
        return Ok(None);
    };
    let (model, Some(tokenizer)) = (module.model(), data.tokenizer()) else { return Ok(None) };
    let split = if data.len(Split::Validation) > 0 { Split::Validation } else { Split::Train };
    let device = Device::Cpu;
    let prompt = data.batch(split, &[0], &device)?.inputs.flatten_all()?.to_vec1::<u32>()?;
    let prompt = &prompt[..prompt.len().min(PROMPT_TOKENS)];
    let mut tokens = prompt.to_vec();

    let _no_grad = no_grad();
    let _scope = ForwardScope::default().enter(); // evaluation, on whole sequences
    let random = Stream::new(ctx.seed, Purpose::Sample, "continuation");
    for i in 0..NEW_TOKENS {
        let window = &tokens[tokens.len().saturating_sub(data.seq_len())..];
        let ids = Tensor::new(window, &device)?.unsqueeze(0)?;
        let logits = model.forward(&ids)?.get(0)?.get(window.len() - 1)?;
        let logits = logits.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        // The model may have more rows than there are tokens.
        let known = data.vocab_size().map_or(logits.len(), |n| n.min(logits.len()));
        let next = draw(&logits[..known], random.uniform(i as u64));
        tokens.push(next);
        if Some(next) == tokenizer.end_of_text() {
            break;
        }
    }
    let (prompt, new) = tokens.split_at(prompt.len());
    let (prompt, new) = (tokenizer.decode(prompt)?, tokenizer.decode(new)?);
    Ok(Some(format!("── prompt\n{prompt}\n── continuation\n{new}\n──")))
}

/// Returns the token at quantile `u` of the softmax of `logits`.
fn draw(logits: &[f64], u: f64) -> u32 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| ((x - max) / TEMPERATURE).exp()).collect();
    let mut rest = u * weights.iter().sum::<f64>();
    for (token, weight) in weights.iter().enumerate() {
        rest -= weight;
        if rest < 0.0 {
            return token as u32;
        }
    }
    weights.len() as u32 - 1
}
