//! [`JobKey`].

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::{Error, Result};

/// The secret key of a job's processes.
///
/// It never goes over a connection: each end proves to the other that it has the key.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey([u8; 32]);

impl JobKey {
    /// Returns the key of the job `job_id`, whose processes share `secret`.
    ///
    /// Jobs with one secret and different ids have different keys.
    pub fn new(secret: &str, job_id: &str) -> Self {
        Self(authenticate(secret.as_bytes(), &[b"fulgurite job", job_id.as_bytes()]))
    }

    /// Returns an unpredictable secret: 128 random bits, as 32 hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Launch`] if the operating system cannot give random numbers.
    pub fn random_secret() -> Result<String> {
        let bits: [u8; 16] = random()?;
        Ok(bits.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Proves that a holder of this key has seen `parts`.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> Proof {
        authenticate(&self.0, parts)
    }

    /// Whether `proof` belongs to `parts`. Takes equally long for all proofs.
    pub(super) fn verify(&self, proof: &Proof, parts: &[&[u8]]) -> bool {
        mac(&self.0, parts).verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

/// An HMAC with SHA-256.
pub(super) type Proof = [u8; 32];

fn authenticate(key: &[u8], parts: &[&[u8]]) -> Proof {
    mac(key, parts).finalize().into_bytes().into()
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        // Each part has its length in front, so that another split of the same bytes has another
        // proof.
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Random bytes.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(e) => Err(Error::Launch(format!("the operating system gives no random numbers: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_secret_and_job() {
        let key = JobKey::new("a secret", "job");
        assert_eq!(key, JobKey::new("a secret", "job"));
        assert_ne!(key, JobKey::new("a secret", "job2"));
        assert_ne!(key, JobKey::new("another secret", "job"));
        assert_eq!(format!("{key:?}"), "JobKey(..)");
    }

    #[test]
    fn proof_depends_on_parts_and_key() {
        let key = JobKey::new("a secret", "job");
        let proof = key.proof(&[b"ab", b"c"]);
        assert!(key.verify(&proof, &[b"ab", b"c"]));
        assert!(!key.verify(&proof, &[b"a", b"bc"]), "the same bytes in a row");
        assert!(!JobKey::new("a secret", "job2").verify(&proof, &[b"ab", b"c"]));
        for bit in 0..8 * proof.len() {
            let mut flipped = proof;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.verify(&flipped, &[b"ab", b"c"]));
        }
    }

    #[test]
    fn secrets_are_random() {
        let (one, other) = (JobKey::random_secret().unwrap(), JobKey::random_secret().unwrap());
        assert_eq!(one.len(), 32);
        assert_ne!(one, other);
    }
}
