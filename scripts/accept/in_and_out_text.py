"""Text and tokens: GPT-2's byte-pair encoding, odd files, Chinese text as bytes."""
import json
import os
import subprocess

import runner
from cluster import BIN, Cluster

DATA = os.path.abspath(runner.DATA)
VOCAB, MERGES = os.path.join(DATA, "tok", "encoder.json"), os.path.join(DATA, "tok", "vocab.bpe")


def program(*args, timeout=600):
    return subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, stdin=subprocess.DEVNULL)


def gtest(report, what, binary, pattern):
    done = program(os.path.join(BIN, binary), "--gtest_filter=" + pattern)
    out = done.stdout.decode(errors="replace")
    good = done.returncode == 0 and "[  PASSED  ] 1 test" in out and "SKIPPED" not in out
    report.check(what, "passes", "passes" if good else "exit %d: %s" % (done.returncode, out[-300:]), good)


def bpe(report):
    gtest(report, "BPE: golden texts, encoded and decoded", "gpt2_bpe_test", "SharedTokenizer.GoldenTexts")
    gtest(report, "BPE: tinyshakespeare equals llm.c's 32,768 + 305,260 tokens", "text_test",
          "SharedText.TinyShakespeareHasLlmcsTokens")
    for name, target in (("tinyshakespeare", 10), ("tang_1mb_zh", None)):
        done = program(os.path.join(BIN, "bench_tokenize"), "--vocab", VOCAB, "--merges", MERGES, "--json",
                       "--text", os.path.join(DATA, "lm", name + ".txt"))
        if done.returncode:
            report.check("BPE: " + name, "exit 0", done.stderr.decode(errors="replace")[-200:], False)
            continue
        measured = json.loads(done.stdout)
        if target:
            limit = target * 0.7 if report.quick else target
            report.at_least("BPE: %s, MB/s a thread, empty memory" % name, limit, measured["encode_mb_per_s"])
        else:
            report.shown("BPE: %s, MB/s a thread, empty memory" % name, "%.1f" % measured["encode_mb_per_s"])
        report.shown("BPE: %s, MB/s: known pre-tokens / decode / cutting alone" % name, "%.0f / %.0f / %.0f" % (
            measured["encode_known_mb_per_s"], measured["decode_mb_per_s"], measured["cut_only_mb_per_s"]))


def spec_for(file):
    text = file.startswith("text/")
    model = {"layers": 1, "heads": 1, "width": 8, "context": 1 if text else 4 if "llama3" in file else 16}
    if not text:
        model["vocabulary"] = 128256 if "llama3" in file else 50257 if "llmc" in file else 65
    return {"model": {"gpt2": model}, "data": {"text" if text else "tokens": {"path": os.path.join(DATA, "nasty", file)}},
            "train": {"rounds": 1, "batch": 1}, "optimizer": {"sgd": {"learning_rate": 0.1}}}


# What the error has to say, or None for a file to be accepted; beside the manifest's words, shown in the table.
VERDICTS = {
    "tokens/llmc_ok.bin": None, "tokens/llmc_llama3_u32.bin": None, "text/bom.txt": None, "text/crlf.txt": None,
    "text/no_final_newline.txt": None, "text/astral.txt": None,
    "tokens/llmc_bad_magic.bin": "a model of llm.c", "tokens/llmc_count_mismatch.bin": "makes a file of 1226 bytes, but it has 1224",
    "tokens/llmc_shorter_than_block.bin": "10 tokens, but a block", "tokens/nanogpt_odd_bytes.bin": "odd size of 3 bytes",
    "tokens/nanogpt_token_out_of_vocab.bin": "the largest is 60000", "text/cut_multibyte_eof.txt": "byte offset 3",
    "text/overlong_surrogate.txt": "overlong", "text/empty.txt": "nothing to train on",
}


def nasty(report, folder):
    for entry in json.load(open(os.path.join(DATA, "nasty", "MANIFEST.json"))):
        file = entry["file"]
        if not file.startswith(("text/", "tokens/")):
            continue
        path = os.path.join(folder, "nasty.json")
        with open(path, "w") as f:
            json.dump(spec_for(file), f)
        done = program(os.path.join(BIN, "sluice"), "validate", path)
        said = " ".join(done.stderr.decode(errors="replace").split())
        want = VERDICTS.get(file, "a verdict that this part knows")
        good = done.returncode == 0 if want is None else done.returncode == 2 and want in said and os.path.basename(file) in said
        report.check("%s (%s)" % (file, entry["expect"][:60]), "accepted" if want is None else "error: ..." + want,
                     "accepted" if done.returncode == 0 else said.replace(os.path.join(DATA, "nasty", ""), "")[:140], good)


def chinese(report, folder, quick):
    rounds = 300 if quick else 1000
    spec = {"name": "tang", "model": {"gpt2": {"layers": 4, "heads": 4, "width": 128, "context": 64}},
            "data": {"text": {"path": os.path.join(DATA, "lm", "tang_1mb_zh.txt")}},
            "train": {"rounds": rounds, "batch": 12, "eval_every": rounds, "eval_samples": 400},
            "optimizer": {"adamw": {"learning_rate": 1e-3, "beta2": 0.99, "weight_decay": 0.1}, "clip_norm": 1.0,
                          "schedule": {"cosine": {"warmup_rounds": 100, "final": 1e-4}}},
            "parallel": {"data": 2}, "checkpoint": {"every_rounds": rounds // 4}}
    with Cluster(servers=2, workers=2) as c:
        job = c.submit(spec)
        early = None
        while early is None:  # from the running job, as soon as it has published a checkpoint
            status = c.status(job)
            if status["state"] in ("SUCCEEDED", "FAILED", "CANCELLED"):
                break
            if "last_checkpoint" in status:
                early = c.sluice("sample", job, "--bytes", "100", check=False, text=False)
        status = c.wait(job)
        sample = c.sluice("sample", job, "--bytes", "600", "--temperature", "0.7", "--top_k", "40", text=False).stdout
        again = c.sluice("sample", job, "--bytes", "600", "--temperature", "0.7", "--top_k", "40", text=False).stdout
        export = os.path.join(folder, "tang")
        c.sluice("export", job, export)
    loss = status["last_evaluation"]["loss"]
    if quick:
        report.shown("Chinese as bytes, %d rounds: validation loss" % rounds, "%.4f" % loss)
    else:
        report.check("Chinese as bytes, %d rounds: validation loss" % rounds, "< 2.930 (bigram)", "%.4f" % loss, loss < 2.930)
    report.check("sample of the running job", "exit 0", "none" if early is None else "exit %d" % early.returncode,
                 early is not None and early.returncode == 0)
    try:
        shown = sample.decode("utf-8")
        han = sum("\u4e00" <= x <= "\u9fff" for x in shown)
        report.check("its sample is valid UTF-8", "yes", "yes: %d characters, %d of them Han, %d not whole" % (
            len(shown), han, shown.count("\ufffd")), True)
    except UnicodeDecodeError as e:
        report.check("its sample is valid UTF-8", "yes", str(e), False)
    report.check("the same seed, the same sample", "equal", "equal" if sample == again else "different", sample == again)
    names = sorted(os.listdir(export))
    report.check("the export carries its tokenizer", "vocab.json, merges.txt", ", ".join(names),
                 {"vocab.json", "merges.txt"} <= set(names))
    from_export = program(os.path.join(BIN, "sluice"), "sample", export, "--bytes", "600", "--temperature", "0.7", "--top_k", "40")
    report.check("a sample of the exported folder", "as the checkpoint's", "equal" if from_export.stdout == sample else "different",
                 from_export.stdout == sample)


def part_text(report, folder, quick):
    bpe(report)
    nasty(report, folder)
    chinese(report, folder, quick)
