//! Names of other projects in pages, by project.

const OTHERS: &[(&str, &[&str])] = &[
    ("Amazon", &["AWS_ACCESS_KEY_ID"]),
    (
        "candle",
        &[
            "DType",
            "affine",
            "linear_no_bias",
            "ops",
            "rotary_emb",
            "scatter_add_set",
            "scatter_set",
            "to_dtype",
            "upsample_nearest2d",
        ],
    ),
    (
        "composer",
        &[
            "activation_cpu_offload",
            "load_monolith_rank0_only",
            "meta_init",
            "prepare_distributed",
            "sync_optimizer_and_model_params",
        ],
    ),
    ("examples of names", &["branch", "name_epoch", "name_step"]),
    ("libclang", &["LIBCLANG_PATH"]),
    (
        "Lightning",
        &[
            "AsyncCheckpointIO",
            "BackboneFinetuning",
            "BasePredictionWriter",
            "BatchSizeFinder",
            "BitsandbytesPrecision",
            "DeepSpeedStrategy",
            "EMAWeightAveraging",
            "LambdaCallback",
            "LearningRateMonitor",
            "MLFlowLogger",
            "ModelPruning",
            "RichProgressBar",
            "SpikeDetection",
            "TensorBoardLogger",
            "WeightAveraging",
            "best_model_path",
            "enable_version_counter",
            "last_model_path",
            "save_on_train_epoch_end",
            "scale_batch_size",
            "strict_loading",
            "sync_dist",
            "train_time_interval",
        ],
    ),
    ("NVIDIA", &["NCCL_SOCKET_IFNAME", "sm_90a"]),
    ("Open MPI", &["btl_vader_eager_limit"]),
    (
        "PEFT and transformers",
        &[
            "lora_bias",
            "num_nextn_predict_layers",
            "save_pretrained",
            "target_parameters",
            "trainable_token_indices",
        ],
    ),
    ("Python", &["IndexError", "__len__"]),
    (
        "PyTorch",
        &[
            "DataLoader",
            "HYBRID_SHARD",
            "HuggingFaceStorageWriter",
            "IterableDataset",
            "MultiheadAttention",
            "PeriodicModelAverager",
            "_FSDPDeviceHandle",
            "_get_root_modules",
            "full_optim_state_dict",
            "in_proj_weight",
            "key_padding_mask",
            "named_parameters",
            "register_comm_hook",
            "set_float32_matmul_precision",
            "update_bn",
        ],
    ),
    ("serde", &["serde_json", "typetag"]),
    ("TRL", &["precompute_ref_log_probs"]),
];

/// Whether a name, or the start of a path, belongs to another project.
pub(super) fn is_of_others(name: &str) -> bool {
    names().any(|other| other == name)
}

/// All names of other projects.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    OTHERS.iter().flat_map(|(_, names)| names.iter().copied())
}
