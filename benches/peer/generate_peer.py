"""Greedy generation with a transformers model on the CPU in f32. Prints one JSON object.

  generate_peer.py --model DIR --prompts FILE --new 64 --threads 2

With --write gpt2 or --write qwen it makes the directory: a model of that size with random weights. End tokens are
ignored, and the prompts, of one length, are one batch.
"""
import argparse
import json
import time


def write(kind, directory):
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config()
    else:
        config = transformers.Qwen2Config(  # Qwen2.5 0.5B
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, max_position_embeddings=32768, rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=True,
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--model", required=True)
    a.add_argument("--write", choices=["gpt2", "qwen"])
    a.add_argument("--prompts")
    a.add_argument("--new", type=int, default=64)
    a.add_argument("--threads", type=int, default=1)
    a = a.parse_args()
    if a.write:
        return write(a.write, a.model)
    import torch
    import transformers

    torch.set_num_threads(a.threads)
    with open(a.prompts) as file:
        ids = torch.tensor([json.loads(line)["ids"] for line in file])
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval()
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=a.new, eos_token_id=None, pad_token_id=0)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        start = time.perf_counter()
        found = model.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1]:]
        secs = time.perf_counter() - start
    print(json.dumps({
        "ids": found.tolist(), "tokens_s": found.numel() / secs, "torch": torch.__version__,
        "transformers": transformers.__version__,
    }))


if __name__ == "__main__":
    main()
