"""nanoGPT's CPU configuration on its tokens of tinyshakespeare, as a spec."""
import os

from runner import DATA


def nano_spec(workers, rounds=2000, seed=1, every=0):
    """every: rounds between checkpoints; 0: only the last one."""
    tok = os.path.abspath(os.path.join(DATA, "tok", "nanogpt_shakespeare_char_"))
    return {"name": "nano", "model": {"gpt2": {"layers": 4, "heads": 4, "width": 128, "context": 64, "vocabulary": 65,
                                               "scaled_residual_init": False}},  # as the reference
            "data": {"tokens": {"path": tok + "train.bin", "validation_path": tok + "val.bin"}},
            "train": {"rounds": rounds, "batch": 12, "seed": seed, "eval_every": rounds},
            "optimizer": {"adamw": {"learning_rate": 1e-3, "beta2": 0.99, "weight_decay": 0.1}, "clip_norm": 1.0,
                          "schedule": {"cosine": {"warmup_rounds": min(100, rounds), "final": 1e-4}}},
            "parallel": {"data": workers}, "checkpoint": {"every_rounds": every or rounds}}
