//! The configuration `checkpoint.io.type = "object_store"`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fulgurite_checkpoint::{CheckpointIO, CheckpointIOConfig};
use fulgurite_config::register_checkpoint_io;
use fulgurite_error::{Error, Result};
use object_store::parse_url_opts;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::ObjectStoreIO;

/// `checkpoint.io.type = "object_store"`: a bucket that all ranks reach.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectStoreConfig {
    /// The place, such as `s3://bucket/my-run`: checkpoints are directly under it. `checkpoint.dir`
    /// is ignored.
    pub url: String,
    /// Settings of the store, by their names in the crate `object_store`, such as `aws_region` and
    /// `aws_endpoint`. Defaults come from the environment (`AWS_…`, `AZURE_…`, `GOOGLE_…`). Secrets
    /// are refused, since configurations are saved.
    pub options: BTreeMap<String, String>,
    /// Larger files are uploaded and read in parts of this many MiB. Stores require at least 5 and
    /// allow 10,000 parts in a file.
    #[default(16)]
    pub part_mib: usize,
    /// How many parts of a file are transferred at the same time; each takes memory.
    #[default(4)]
    pub concurrency: usize,
}

/// Prefixes of the environment variables that configure stores.
const VARIABLES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

impl ObjectStoreConfig {
    fn checked_url(&self) -> std::result::Result<Url, String> {
        if self.url.is_empty() {
            return Err("needs a `url`, such as `s3://bucket/my-run`".to_owned());
        }
        if self.part_mib == 0 || self.concurrency == 0 {
            return Err("`part_mib` and `concurrency` must be at least 1".to_owned());
        }
        let secret = |key: &&String| {
            let key = key.to_ascii_lowercase();
            ["secret", "token", "password", "sas_key", "account_key", "private_key"]
                .iter()
                .any(|part| key.contains(part))
                || key.ends_with("access_key")
        };
        if let Some(key) = self.options.keys().find(secret) {
            return Err(format!(
                "`options.{key}` is a secret, and the configuration is saved with every \
                 checkpoint. Set the environment variable `{}` instead",
                key.to_ascii_uppercase()
            ));
        }
        Url::parse(&self.url).map_err(|e| {
            format!("`{}` is no URL ({e}). Expected one such as `s3://bucket/my-run`", self.url)
        })
    }
}

#[typetag::serde(name = "object_store")]
impl CheckpointIOConfig for ObjectStoreConfig {
    fn build(&self, _: &Path) -> Result<Arc<dyn CheckpointIO>> {
        let url = self.checked_url().map_err(fail)?;
        let variables = std::env::vars()
            .filter(|(key, _)| VARIABLES.iter().any(|start| key.starts_with(start)));
        let options = variables.chain(self.options.clone());
        let (store, prefix) =
            parse_url_opts(&url, options).map_err(|e| fail(format!("`{}`: {e}", self.url)))?;
        let io = ObjectStoreIO::at(Arc::from(store), &self.url, prefix)?;
        Ok(Arc::new(io.with_parts(self.part_mib << 20, self.concurrency)))
    }

    fn check(&self) -> Result<()> {
        self.checked_url().map(drop).map_err(fail)
    }
}

fn fail(message: String) -> Error {
    Error::other(format!("checkpoint.io, object store: {message}"))
}

register_checkpoint_io!(
    "object_store",
    ObjectStoreConfig,
    "a bucket of an object store that all ranks reach",
    "{ type = \"object_store\", url = \"s3://bucket/my-run\" }"
);

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let table: toml::Table = toml::from_str(text).unwrap();
        match Box::<dyn CheckpointIOConfig>::deserialize(table["io"].clone()) {
            Ok(config) => config.build(Path::new("")).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn object_store_is_selected_and_checked() {
        fulgurite_config::registry::validate().unwrap();
        fulgurite_config::registry::require("checkpoint_io", "object_store").unwrap();
        let errors = [
            error("io = { type = \"object_store\" }"),
            error("io = { type = \"object_store\", url = \"bucket/x\" }"),
            error("io = { type = \"object_store\", url = \"ftp://x/y\" }"),
            error("io = { type = \"object_store\", url = \"memory:///\", part_mib = 0 }"),
            error(
                "io = { type = \"object_store\", url = \"s3://x\", options = { aws_secret_access_key = \"x\" } }",
            ),
            error("io = { type = \"object_store\", uri = \"s3://x\" }"),
        ];
        insta::assert_snapshot!(errors.join("\n"), @r#"
checkpoint.io, object store: needs a `url`, such as `s3://bucket/my-run`
checkpoint.io, object store: `bucket/x` is no URL (relative URL without a base). Expected one such as `s3://bucket/my-run`
checkpoint.io, object store: `ftp://x/y`: Generic URL error: Unable to recognise URL "ftp://x/y"
checkpoint.io, object store: `part_mib` and `concurrency` must be at least 1
checkpoint.io, object store: `options.aws_secret_access_key` is a secret, and the configuration is saved with every checkpoint. Set the environment variable `AWS_SECRET_ACCESS_KEY` instead
unknown field `uri`, expected one of `url`, `options`, `part_mib`, `concurrency`
"#);
    }

    #[test]
    fn directory_url_is_a_store() {
        let temp = tempfile::tempdir().unwrap();
        let url = format!("file://{}", temp.path().display());
        let config = ObjectStoreConfig { url: url.clone(), ..ObjectStoreConfig::default() };
        let io = config.build(Path::new("unused")).unwrap();
        io.save("a/b", b"x").unwrap();
        assert_eq!(std::fs::read(temp.path().join("a/b")).unwrap(), b"x");
        assert_eq!(io.location("a/b"), Path::new(&format!("{url}/a/b")));
    }
}
