//! Beam search: the most likely texts instead of the most likely token at a time.

use fulgurite_error::{Error, Result};

use super::{Generation, Sampling};

/// The options of a beam search, as in `transformers` with `early_stopping=False`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSearch {
    /// Number of texts that are continued at a time; 1 takes the most likely token (greedy).
    pub num_beams: usize,
    /// The exponent of a text's length, by which its log-probability is divided. Above 0 longer
    /// texts gain.
    pub length_penalty: f64,
}

impl Default for BeamSearch {
    fn default() -> Self {
        Self { num_beams: 1, length_penalty: 1.0 }
    }
}

impl BeamSearch {
    /// Checks the options.
    ///
    /// # Errors
    /// Names the first that is wrong.
    pub fn check(&self) -> Result<()> {
        if self.num_beams == 0 {
            return Err(Error::Config("`num_beams`: must be at least 1, found 0".to_owned()));
        }
        match self.length_penalty.is_finite() {
            true => Ok(()),
            false => {
                let found = self.length_penalty;
                Err(Error::Config(format!("`length_penalty`: must be a number, found {found}")))
            }
        }
    }

    /// [`check`](Self::check), and refuses options of a generation that a beam search does not
    /// know.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn check_with(&self, generation: &Generation) -> Result<()> {
        self.check()?;
        let Sampling { repetition_penalty, .. } = generation.sampling;
        let greedy = Sampling { repetition_penalty, ..Sampling::default() };
        let is_plain = generation.sampling == greedy && generation.samples == 1;
        if self.num_beams > 1 && !(is_plain && generation.stop.is_empty()) {
            return Err(Error::Config(
                "`num_beams`: a beam search writes one text, samples nothing and does not end at texts; leave those \
                 options out"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// The score of a text of `tokens` tokens with this log-probability.
    fn score(&self, log_probability: f32, tokens: usize) -> f32 {
        (f64::from(log_probability) / (tokens as f64).powf(self.length_penalty)) as f32
    }
}

/// A text that is continued.
#[derive(Debug, Clone)]
struct Beam {
    /// Its tokens, behind the start token.
    ids: Vec<u32>,
    log_probability: f32,
}

/// The beams of one text.
#[derive(Debug)]
pub(crate) struct Beams {
    start: u32,
    running: Vec<Beam>,
    /// Texts that have ended and their scores, the best first.
    finished: Vec<(Vec<u32>, f32)>,
    /// Whether a running beam may still become better than the finished ones.
    improves: bool,
}

/// A beam's next token.
struct Candidate {
    beam: usize,
    token: u32,
    log_probability: f32,
}

impl Beams {
    /// Beams that begin with one token.
    pub(crate) fn new(start: u32, search: &BeamSearch) -> Self {
        // All begin alike, so that only one of them counts at first.
        let log_probability = |i| if i == 0 { 0.0 } else { -1e9 };
        let beam = |i| Beam { ids: Vec::new(), log_probability: log_probability(i) };
        let running = (0..search.num_beams).map(beam).collect();
        Self { start, running, finished: Vec::new(), improves: true }
    }

    /// Whether further tokens may change the result.
    pub(crate) fn is_open(&self, generation: &Generation) -> bool {
        self.improves && self.running[0].ids.len() < generation.max_new_tokens
    }

    /// The last token of each beam.
    pub(crate) fn last(&self) -> impl Iterator<Item = u32> {
        self.running.iter().map(|beam| beam.ids.last().copied().unwrap_or(self.start))
    }

    /// Continues the beams by the logits of their next tokens, and returns for each new beam the
    /// one that it continues. Changes `logits`.
    pub(crate) fn advance(
        &mut self,
        logits: &mut [f32],
        search: &BeamSearch,
        generation: &Generation,
    ) -> Vec<usize> {
        let vocabulary = logits.len() / self.running.len();
        for (beam, logits) in self.running.iter().zip(logits.chunks_exact_mut(vocabulary)) {
            log_softmax(logits);
            let before: Vec<u32> = std::iter::once(self.start).chain(beam.ids.clone()).collect();
            generation.sampling.penalise(logits, &before);
            logits.iter_mut().for_each(|logit| *logit += beam.log_probability);
        }
        // Enough that as many go on as there are beams, whichever of them end.
        let kept = (1 + generation.end_tokens.len()).max(2) * self.running.len();
        let candidates = best(logits, kept).into_iter().map(|at| Candidate {
            beam: at / vocabulary,
            token: (at % vocabulary) as u32,
            log_probability: logits[at],
        });
        let tokens = self.running[0].ids.len() + 1;
        let is_last = tokens == generation.max_new_tokens;
        let (mut next, mut parents) = (Vec::new(), Vec::new());
        for (place, candidate) in candidates.enumerate() {
            let mut ids = self.running[candidate.beam].ids.clone();
            ids.push(candidate.token);
            let ends = is_last || generation.end_tokens.contains(&candidate.token);
            if ends && place < self.running.len() {
                self.finished.push((ids, search.score(candidate.log_probability, tokens)));
            } else if !ends && next.len() < self.running.len() {
                next.push(Beam { ids, log_probability: candidate.log_probability });
                parents.push(candidate.beam);
            }
        }
        self.finished.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        self.finished.truncate(search.num_beams);
        if is_last || next.len() < self.running.len() {
            self.improves = false;
            return (0..self.running.len()).collect();
        }
        self.running = next;
        if let [.., (_, worst)] = &self.finished[..]
            && self.finished.len() == search.num_beams
        {
            self.improves &= search.score(self.running[0].log_probability, tokens) > *worst;
        }
        parents
    }

    /// The best text, without the start token.
    pub(crate) fn finish(self) -> Vec<u32> {
        let best = self.finished.into_iter().next().map(|(ids, _)| ids);
        best.or_else(|| self.running.into_iter().next().map(|beam| beam.ids)).unwrap_or_default()
    }
}

/// The places of the largest values, the largest first; of equal ones the first.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    let order = |a: &usize, b: &usize| values[*b].total_cmp(&values[*a]).then(a.cmp(b));
    if count < places.len() {
        places.select_nth_unstable_by(count, order);
        places.truncate(count);
    }
    places.sort_unstable_by(order);
    places
}

fn log_softmax(logits: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    let level = most + sum.ln() as f32;
    logits.iter_mut().for_each(|logit| *logit -= level);
}
