"""Training steps of a transformers model on the CPU, in f32 with AdamW. Prints one JSON object.

  models_peer.py --model gpt2 --steps 10 --threads 2

Weights are random, dropouts 0, and the batches are in memory beforehand.
"""
import argparse
import json
import resource
import statistics
import time


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", choices=["gpt2", "vit", "t5"], required=True)
    a.add_argument("--batch", type=int, required=True)
    a.add_argument("--seq", type=int, default=0)
    a.add_argument("--steps", type=int, default=10)
    a.add_argument("--threads", type=int, default=1)
    a = a.parse_args()
    import torch
    import transformers

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    if a.model == "gpt2":
        config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.randint(0, config.vocab_size, (a.batch, a.seq))
        batch = {"input_ids": ids, "labels": ids}
    elif a.model == "t5":
        config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
        model = transformers.T5ForConditionalGeneration(config)
        ids = torch.randint(0, config.vocab_size, (a.batch, a.seq))
        batch = {"input_ids": ids, "labels": torch.randint(0, config.vocab_size, (a.batch, a.seq // 4))}
    else:
        config = transformers.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=10)
        model = transformers.ViTForImageClassification(config)
        pixels = torch.rand(a.batch, 3, config.image_size, config.image_size)
        batch = {"pixel_values": pixels, "labels": torch.arange(a.batch) % 10}
    model.train()
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times, losses = [], []
    for _ in range(a.steps):
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    print(json.dumps({
        "parameters": sum(p.numel() for p in model.parameters()), "step_s": statistics.median(times),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "loaded_mib": loaded,
        "loss_first": losses[0], "loss_last": losses[-1], "torch": torch.__version__,
        "transformers": transformers.__version__,
    }))


if __name__ == "__main__":
    main()
