"""Trains the bundled demo model: a small Llama on the Python standard library's sources, on a CPU, in about an hour.

    python examples/train_bundled_model.py --out pdserve/models/stdlib-5m --minutes 64
    python examples/train_bundled_model.py --out pdserve/models/stdlib-5m --only-sample

The learning rate follows the share of ``--minutes`` that is used up, so a slow machine sees fewer tokens but still
ends with a finished schedule.  ``--resume`` goes on from the last checkpoint in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bundled_corpus import END_OF_TEXT, encode_files, split_files, standard_library, tokenizer_config, train_tokenizer
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SEED = 20_260
HELD_OUT = 0.02
LONG_SHARE = 0.85  # from this share of the time on, sequences are LONG tokens
SHORT, LONG = 512, 1024
PROMPTS = ("def fib(n):", "import json\n\n", "class Stack:", "# Return the")


@dataclass
class Progress:
    """The progress of a run; stored in its checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float = 0.0


def model_config(vocab_size: int) -> LlamaConfig:
    """The shape of the bundled model."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def learning_rate(peak: float, step: int, share: float) -> float:
    """Warm-up over 100 steps, then a cosine over the share of the time that is used up, down to 2 % of the peak."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
    return peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * cosine)


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss, with the matrix products in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: Any, ids: torch.Tensor, length: int, limit: int | None = None) -> float:
    """Loss in nats per token over consecutive windows of the given length."""
    starts = list(range(0, len(ids) - 1, length))[:limit]
    total, count = 0.0, 0
    for start in starts:
        window = ids[start : start + length + 1].unsqueeze(0)
        total += float(loss_of(model, window)) * (window.shape[1] - 1)
        count += window.shape[1] - 1
    return total / count


def export(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the Hugging Face folder, with the weights rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    stored = LlamaForCausalLM(model.config).to(torch.bfloat16)
    stored.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
    stored.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    stored.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = tokenizer_config(model.config.max_position_embeddings)
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def print_samples(folder: Path, new_tokens: int, temperatures: tuple[float, ...] = (0.0, 0.7)) -> None:
    """Prints continuations of the demo prompts from the stored folder."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        for temperature in temperatures:
            torch.manual_seed(SEED)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **sampling)
            text = tokenizer.decode(made[0].tolist(), skip_special_tokens=False)
            print(f"=== temperature {temperature}\n{text}\n", flush=True)


class Trainer:
    """One training run: data, model, optimiser, and the checkpoint they come back from."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        files = standard_library()
        train, held_out = split_files(files, HELD_OUT, SEED)
        self.tokenizer = train_tokenizer(train, args.vocab_size)
        self.train_ids = torch.tensor(encode_files(self.tokenizer, train, SEED))
        self.val_ids = torch.tensor(encode_files(self.tokenizer, held_out, SEED))
        self.val_bytes = sum(len(file.document.encode()) for file in held_out)
        self.data = {
            "files": len(files),
            "bytes": sum(len(file.text.encode()) for file in files),
            "train_tokens": len(self.train_ids),
            "val_files": [file.name for file in held_out],
            "val_tokens": len(self.val_ids),
            "val_bytes": self.val_bytes,
        }
        torch.manual_seed(SEED)
        self.model: Any = LlamaForCausalLM(model_config(self.tokenizer.get_vocab_size()))
        matrices = [value for value in self.model.parameters() if value.dim() > 1]
        vectors = [value for value in self.model.parameters() if value.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        self.progress = Progress()
        if args.resume:
            self.load()

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save({**parts, "progress": asdict(self.progress)}, partial)
        partial.replace(self.checkpoint)
        export(self.model, self.tokenizer, self.work / "model")

    def batch(self, length: int) -> torch.Tensor:
        """Random windows of the training text; the step number alone decides which."""
        generator = torch.Generator().manual_seed(SEED + 1 + self.progress.step)
        rows = max(1, self.args.batch_tokens // length)
        starts = torch.randint(0, len(self.train_ids) - length - 1, (rows,), generator=generator)
        return torch.stack([self.train_ids[start : start + length + 1] for start in starts.tolist()])

    def step(self) -> float:
        """One optimiser step; returns the batch's loss."""
        share = self.progress.seconds / (60 * self.args.minutes)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.args.lr, self.progress.step, share)
        batch = self.batch(LONG if share >= LONG_SHARE else SHORT)
        loss = loss_of(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += batch.numel() - batch.shape[0]
        return float(loss.detach())

    def report_validation(self) -> None:
        loss = mean_loss(self.model, self.val_ids, SHORT)
        print(f"  validation loss {loss:.4f}  perplexity {math.exp(loss):.2f}", flush=True)

    def run(self) -> None:
        """Trains until the minutes are used up."""
        limit, progress = 60 * self.args.minutes, self.progress
        last_print, last_save = progress.seconds, progress.seconds
        tokens_then = progress.tokens
        while progress.seconds < limit:
            began = time.perf_counter()
            loss = self.step()
            progress.seconds += time.perf_counter() - began
            progress.train_loss = loss if progress.step == 1 else 0.98 * progress.train_loss + 0.02 * loss
            if progress.step % 25 == 0:
                speed = (progress.tokens - tokens_then) / max(1e-9, progress.seconds - last_print)
                last_print, tokens_then = progress.seconds, progress.tokens
                left = max(0.0, limit - progress.seconds) / 60
                print(
                    f"step {progress.step:5d}  loss {loss:.4f}  mean {progress.train_loss:.4f}  "
                    f"{speed:6.0f} tokens/s  {progress.tokens / 1e6:.2f} M tokens  ETA {left:.1f} min",
                    flush=True,
                )
            if progress.seconds - last_save >= 60 * self.args.save_minutes:
                last_save = progress.seconds
                self.save()
                self.report_validation()
        self.save()

    def finish(self, out: Path) -> None:
        """Exports the model and measures what was stored, not what was trained."""
        export(self.model, self.tokenizer, out)
        stored: Any = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        results: dict[str, object] = {**self.data, **asdict(self.progress)}
        results["parameters"] = sum(value.numel() for value in stored.parameters())
        for length in (SHORT, LONG):
            val = mean_loss(stored, self.val_ids, length)
            bits = val * (len(self.val_ids) - 1) / self.val_bytes / math.log(2)
            results[f"val_{length}"] = {"loss": val, "perplexity": math.exp(val), "bits_per_byte": bits}
        results["train_loss_stored"] = mean_loss(stored, self.train_ids, SHORT, limit=200)
        (self.work / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps(results, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "bundled-model", help="folder for checkpoints"
    )
    parser.add_argument("--minutes", type=float, default=64.0, help="training time, evaluation not counted")
    parser.add_argument("--save-minutes", type=float, default=5.0, help="time between checkpoints")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one step")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work")
    parser.add_argument("--only-sample", action="store_true", help="print samples from --out and stop")
    parser.add_argument("--sample-tokens", type=int, default=120)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.nice(5)
    torch.set_num_threads(args.threads)
    if not args.only_sample:
        trainer = Trainer(args)
        print(f"{trainer.data}\n{END_OF_TEXT} is id {trainer.tokenizer.token_to_id(END_OF_TEXT)}", flush=True)
        trainer.run()
        trainer.finish(args.out)
    print_samples(args.out, args.sample_tokens)


if __name__ == "__main__":
    main()
