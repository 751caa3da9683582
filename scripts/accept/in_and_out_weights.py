"""Weights in and out: Hugging Face GPT-2 folders, in one file or in shards, F32, F16 and BF16."""
import json
import os
import resource
import shutil
import signal
import subprocess

import numpy as np

import tensors
from cluster import BIN, Cluster
from golden import Golden, losses
from runner import DATA, program

SLUICE = os.path.join(BIN, "sluice")
SYNTH = os.path.join(DATA, "synth", "synth_gpt2_")
TINY = os.path.join(DATA, "ckpt", "tiny_gpt2_")


def folder_of(where, config, weights):
    os.makedirs(where)
    shutil.copy(config, os.path.join(where, "config.json"))
    if isinstance(weights, bytes):
        with open(os.path.join(where, "model.safetensors"), "wb") as f:
            f.write(weights)
    else:
        shutil.copy(weights, os.path.join(where, "model.safetensors"))
    os.chmod(os.path.join(where, "config.json"), 0o644)
    os.chmod(os.path.join(where, "model.safetensors"), 0o644)
    return where


def logits(model, ids):
    done = program(SLUICE, "sample", model, "--tokens", " ".join(map(str, ids)), "--logits")
    return np.array(json.loads(done.stdout)) if done.returncode == 0 else np.array([np.nan])


def tail(text, length=110):
    text = " ".join(text.split())
    return text if len(text) <= length else "..." + text[-length:]


# ----------------------------------------------------------------------------------------------------- odd files
def nasty(report, folder):
    done = program(os.path.join(BIN, "safetensors_test"))
    report.check("safetensors_test: format checks", "passes", "exit %d" % done.returncode, done.returncode == 0)
    for entry in json.load(open(os.path.join(DATA, "nasty", "MANIFEST.json"))):
        if not entry["file"].startswith("safetensors/"):
            continue
        name = os.path.basename(entry["file"])
        where = folder_of(os.path.join(folder, "nasty", name), SYNTH + "config.json",
                          os.path.join(DATA, "nasty", entry["file"]))
        done = program(SLUICE, "sample", where, "--tokens", "1", "--logits")
        # A file of the format that is no GPT-2 gets through to the check of its tensors.
        accepted = "does not hold a GPT-2" in done.stdout
        want = "ACCEPT" in entry["expect"]
        named = os.path.join(where, "model.safetensors") in done.stdout
        report.check("odd file " + name, "accepted as a format" if want else "refused, file and cause named",
                     tail(done.stdout.replace(where, "")), done.returncode != 0 and accepted == want and named)


def faults(report, folder):
    """What `sluice validate` says of init.path before anything is submitted."""
    weights = tensors.read(SYNTH + "noprefix_model.safetensors")
    rows = os.path.join(folder, "rows.jsonl")
    with open(rows, "w") as f:
        f.write("[1, 2, 3]\n" * 8)
    base = {"name": "fault", "model": {"gpt2": {}}, "data": {"rows": {"path": rows}, "validation_fraction": 0},
            "train": {"rounds": 2, "batch": 2}, "optimizer": {"sgd": {"learning_rate": 0.1}}}

    def check(what, texts, change=None, config=None, contents=None, gpt2=None, good=False, head=None):
        where = folder_of(os.path.join(folder, "fault-%d" % check.count), SYNTH + "config.json", contents or b"")
        check.count += 1
        if contents is None:
            changed = dict(weights)
            (change or (lambda t: None))(changed)
            tensors.write(os.path.join(where, "model.safetensors"), changed)
        path = os.path.join(where, "config.json")
        settings = json.load(open(path)) | (config or {})
        json.dump({k: v for k, v in settings.items() if v != "absent"}, open(path, "w"))
        spec = os.path.join(where, "spec.json")
        json.dump(base | {"model": {"gpt2": gpt2 or {}}, "init": {"path": where}}, open(spec, "w"))
        done = program(SLUICE, "validate", spec, "--print")
        found = all(t in done.stdout for t in texts)
        report.check("import: " + what, "accepted" if good else "exit 2, the cause named", tail(done.stdout.replace(where, "")),
                     done.returncode == (0 if good else 2) and found)

    check.count = 0
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 548105171\n"
    check("sizes filled in from config.json", ["layers: 2", "heads: 4", "width: 32", "context: 64", "vocabulary: 96"], good=True)
    check("a missing tensor", ['missing: "h.1.ln_1.bias" [32]'], lambda t: t.pop("h.1.ln_1.bias"))
    check("all tensors of a layer missing", ['"h.1.ln_1.bias"', "and 4 more"],
          lambda t: [t.pop(n) for n in list(t) if n.startswith("h.1.")])
    check("an unknown tensor", ['unknown: "score.weight"'], lambda t: t.update({"score.weight": np.zeros((2, 32), np.float32)}))
    check("a transposed weight", ['"h.0.mlp.c_fc.weight": expected F32 [32, 128], found F32 [128, 32]'],
          lambda t: t.update({"h.0.mlp.c_fc.weight": t["h.0.mlp.c_fc.weight"].T.copy()}))
    check("a Git LFS pointer", ["model.safetensors", "Git LFS pointer"], contents=lfs)
    check("an HTML page", ["model.safetensors", "HTML"], contents=b"<!DOCTYPE html><html><body>404</body></html>")
    check("activation_function relu", ['activation_function is "relu"'], config={"activation_function": "relu"})
    check("scale_attn_weights false", ["scale_attn_weights is false"], config={"scale_attn_weights": False})
    check("n_head that differs from the spec", ["n_head is 4, but the job's model.gpt2.heads is 2"], gpt2={"heads": 2})
    check("layer_norm_epsilon that differs", ["layer_norm_epsilon is 1e-06"], config={"layer_norm_epsilon": 1e-6},
          gpt2={"layer_norm_epsilon": 1e-5})
    check("n_layer missing in config.json", ["n_layer is missing"], config={"n_layer": "absent"})
    check("masks and an equal lm_head", ["layers: 2"], lambda t: t.update(
        {"lm_head.weight": t["wte.weight"], "h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}), good=True)
    where = folder_of(os.path.join(folder, "head"), SYNTH + "config.json", b"")
    other = dict(weights) | {"lm_head.weight": weights["wte.weight"] + 1}
    tensors.write(os.path.join(where, "model.safetensors"), other)
    done = program(SLUICE, "sample", where, "--tokens", "1", "--logits")
    report.check("import: an lm_head that is not wte", "refused, both named", tail(done.stdout.replace(where, "")),
                 done.returncode != 0 and "lm_head.weight" in done.stdout and "wte.weight" in done.stdout)
    spec = Golden(os.path.join(folder, "head-job")).spec("sgd", 1) | {"init": {"path": where}}
    with Cluster(servers=2, workers=1) as c:
        job = c.submit(spec)
        subprocess.run([SLUICE, "watch", job, "--scheduler=127.0.0.1:%d" % c.scheduler_port], stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=120)
        status = c.status(job)
    report.check("a job from an lm_head that is not wte", "FAILED, the tensor named", tail(status.get("message", "")),
                 status["state"] == "FAILED" and "lm_head.weight" in status.get("message", ""))


# ------------------------------------------------------------------------------------------------ values and bits
def references(report, folder):
    cases = [("synth_gpt2", SYNTH, SYNTH + "model.safetensors", "logits"),
             ("synth_gpt2 without prefix", SYNTH, SYNTH + "noprefix_model.safetensors", "logits"),
             ("tiny_gpt2", TINY, TINY + "model.safetensors", "logits_tied")]
    for i, (name, base, weights, key) in enumerate(cases):
        where = folder_of(os.path.join(folder, "reference-%d" % i), base + "config.json", weights)
        reference = json.load(open(base + "reference.json"))
        ids, want = reference["input_ids"], np.array(reference[key])
        error = max(float(np.max(np.abs(logits(where, ids[:n]) - want[n - 1]))) for n in range(1, len(ids) + 1))
        report.at_most("%s: logits at all %d positions, largest error" % (name, len(ids)), 1e-5, error)


def equal(a, b):
    return a.keys() == b.keys() and all(x.shape == b[n].shape and x.tobytes() == b[n].tobytes() for n, x in a.items())


def round_trips(report, folder):
    for i, (name, base, weights) in enumerate([("synth_gpt2", SYNTH, SYNTH + "model.safetensors"),
                                               ("tiny_gpt2", TINY, TINY + "model.safetensors")]):
        start = folder_of(os.path.join(folder, "start-%d" % i), base + "config.json", weights)
        original = {n[len("transformer."):] if n.startswith("transformer.") else n: t for n, t in tensors.read(weights).items()}
        for dtype in ("F32", "BF16", "F16"):
            for limit in ("5GB", "20KB"):
                what = "%s, %s, files of at most %s" % (name, dtype, limit)
                out, back = (os.path.join(folder, "%s-%d-%s-%s" % (x, i, dtype, limit)) for x in ("out", "back"))
                for source, target, more in ((start, out, ["--dtype", dtype, "--max_shard_size", limit]), (out, back, [])):
                    done = program(SLUICE, "export", source, target, *more)
                    if done.returncode:
                        report.check(what, "exports", tail(done.stdout), False)
                        break
                else:
                    want = original if dtype == "F32" else {n: tensors.round_to(t, dtype) for n, t in original.items()}
                    files = [f for f in os.listdir(out) if f.endswith(".safetensors")]
                    sharded = "model.safetensors.index.json" in os.listdir(out)
                    good = equal(tensors.read_folder(out), want) and equal(tensors.read_folder(back), want)
                    good = good and sharded == (len(files) > 1) == (limit == "20KB" and name == "synth_gpt2")
                    report.check("export and import: " + what, "equal bits" + ("" if dtype == "F32" else " as rounded by numpy"),
                                 "%s in %d file(s)" % ("equal" if good else "DIFFERENT", len(files)), good)
    large = dict(original) | {"ln_f.bias": np.full(original["ln_f.bias"].shape, 70000, np.float32)}
    where = folder_of(os.path.join(folder, "large"), TINY + "config.json", b"")
    tensors.write(os.path.join(where, "model.safetensors"), large)
    done = program(SLUICE, "export", where, os.path.join(folder, "too-large"), "--dtype", "F16")
    report.check("export: a value beyond F16", "refused, tensor and value named", tail(done.stdout),
                 done.returncode == 2 and "ln_f.bias" in done.stdout and "70000" in done.stdout
                 and not os.path.exists(os.path.join(folder, "too-large")))


def full_disk(report, folder):
    start = folder_of(os.path.join(folder, "full-start"), SYNTH + "config.json", SYNTH + "model.safetensors")
    inside = os.path.join(folder, "full")
    os.makedirs(inside)

    def attempt(target, limit=None):
        def lower():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return subprocess.run([SLUICE, "export", start, target, "--max_shard_size", "50KB"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, preexec_fn=lower if limit else None)

    for limit in (1000, 20000, 40000):
        done = attempt(os.path.join(inside, "model"), limit)
        report.check("export: files limited to %d bytes" % limit, "refused, nothing left", tail(done.stdout),
                     done.returncode == 2 and "File too large" in done.stdout and os.listdir(inside) == [])
    disk = os.path.join(folder, "disk")
    os.makedirs(disk)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90k", "tmpfs", disk], stderr=subprocess.DEVNULL).returncode:
        return report.skipped("export: a full file system", "mounting one needs root")
    try:
        done = attempt(os.path.join(disk, "model"))
        report.check("export: a file system of 90 KiB is full", "refused, nothing left", tail(done.stdout),
                     done.returncode == 2 and "No space left" in done.stdout and os.listdir(disk) == [])
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        done = attempt(os.path.join(disk, "model"))
        report.check("export: the same with space", "succeeds", "exit %d" % done.returncode, done.returncode == 0)
    finally:
        subprocess.run(["umount", disk])


# ------------------------------------------------------------------------------------------------------ training
def fine_tune(report, folder):
    golden = Golden(os.path.join(folder, "golden"))
    weights = tensors.read(SYNTH + "model.safetensors")
    extra = dict(weights) | {"lm_head.weight": weights["transformer.wte.weight"],
                             "transformer.h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32),
                             "transformer.h.0.attn.masked_bias": np.array(-1e4, np.float32)}
    variants = {"noprefix": folder_of(os.path.join(folder, "v-noprefix"), SYNTH + "config.json", SYNTH + "noprefix_model.safetensors"),
                "lm_head and masks": folder_of(os.path.join(folder, "v-extra"), SYNTH + "config.json", b"")}
    tensors.write(os.path.join(variants["lm_head and masks"], "model.safetensors"), extra)
    variants["shards"] = os.path.join(folder, "v-shards")
    program(SLUICE, "export", golden.init, variants["shards"], "--max_shard_size", "20KB")
    half, wide = os.path.join(folder, "v-bf16"), os.path.join(folder, "v-bf16-wide")
    program(SLUICE, "export", golden.init, half, "--dtype", "BF16")
    program(SLUICE, "export", half, wide)
    with Cluster(servers=2, workers=2) as c:
        def train(case, init, chunk=997):
            job, _ = c.run(golden.spec(case, 2, chunk) | {"model": {"gpt2": {}}, "init": {"path": init}})
            return job, golden.export(c, job)
        for case in golden.reference["cases"]:
            job, trained = train(case, golden.init)
            error = max(abs(a - b) for a, b in zip(losses(c, job), golden.reference["cases"][case]["losses"]))
            report.at_most("fine-tuning 12 rounds, %s: loss error" % case, 5e-6, error)
            expected = tensors.read(os.path.join(DATA, "golden", "gpt2_%s_after_12.safetensors" % case))
            report.at_most("fine-tuning 12 rounds, %s: parameters, relative norm" % case, 2e-5,
                           tensors.relative_norm(tensors.read(trained), expected, case.startswith("adam")))
            want = tensors.digest(trained)  # of adamw_clip at the end
        for name, init in variants.items():
            found = tensors.digest(train(case, init)[1])
            report.check("fine-tuning from the same weights, %s" % name, want, found, found == want)
        a, b = (tensors.digest(train(case, init)[1]) for init in (half, wide))
        report.check("fine-tuning from BF16 and from the same values in F32", a, b, a == b and a != want)


def bytes_read(report, folder, quick):
    """A model of 15 MB in one file and a job of one round: what each server reads of it."""
    config = {"model_type": "gpt2", "activation_function": "gelu_new", "n_layer": 4, "n_head": 4, "n_embd": 256,
              "n_positions": 64, "vocab_size": 2000, "layer_norm_epsilon": 1e-5}
    random, c, init = np.random.RandomState(1), 256, os.path.join(folder, "large-init")
    shapes = {"wte.weight": (2000, c), "wpe.weight": (64, c), "ln_f.weight": (c,), "ln_f.bias": (c,)}
    for i in range(4):
        for name, shape in (("ln_1.weight", (c,)), ("ln_1.bias", (c,)), ("ln_2.weight", (c,)), ("ln_2.bias", (c,)),
                            ("attn.c_attn.weight", (c, 3 * c)), ("attn.c_attn.bias", (3 * c,)), ("attn.c_proj.weight", (c, c)),
                            ("attn.c_proj.bias", (c,)), ("mlp.c_fc.weight", (c, 4 * c)), ("mlp.c_fc.bias", (4 * c,)),
                            ("mlp.c_proj.weight", (4 * c, c)), ("mlp.c_proj.bias", (c,))):
            shapes["h.%d.%s" % (i, name)] = shape
    os.makedirs(init)
    json.dump(config, open(os.path.join(init, "config.json"), "w"))
    tensors.write(os.path.join(init, "model.safetensors"),
                  {n: (random.standard_normal(s) * 0.02).astype(np.float32) for n, s in shapes.items()})
    size = os.path.getsize(os.path.join(init, "model.safetensors"))
    rows = os.path.join(folder, "large-rows.jsonl")
    with open(rows, "w") as f:
        f.write("[1, 2, 3, 4]\n" * 4)
    spec = {"name": "large-init", "model": {"gpt2": {}}, "data": {"rows": {"path": rows}, "validation_fraction": 0},
            "train": {"rounds": 1, "batch": 2}, "optimizer": {"sgd": {"learning_rate": 0.1}}, "init": {"path": init}}

    def counter(process):
        for line in open("/proc/%d/io" % process.pid):
            if line.startswith("rchar:"):
                return int(line.split()[1])

    found = {}
    for servers in (1, 2):
        for with_init in (False, True):
            with Cluster(servers=servers, workers=1) as cluster:
                names = ["server-%d" % i for i in range(servers)]
                before = [counter(cluster.daemons[n]) for n in names]
                model = {"layers": 4, "heads": 4, "width": c, "context": 64, "vocabulary": 2000}
                cluster.run(spec if with_init else spec | {"init": {}, "model": {"gpt2": model}})
                found[servers, with_init] = [counter(cluster.daemons[n]) - b for n, b in zip(names, before)]
    shares = {s: [(x - y) / size for x, y in zip(found[s, True], found[s, False])] for s in (1, 2)}
    report.check("bytes of model.safetensors read by the only server, as a share of the file", "0.95 to 1.10", "%.3f" % shares[1][0],
                 0.95 <= shares[1][0] <= 1.10)
    for i, share in enumerate(shares[2]):
        report.check("bytes read by server %d of 2, as a share of the file" % i, "0.40 to 0.60", "%.3f" % share, 0.40 <= share <= 0.60)


def part_weights(report, folder, quick):
    folder = os.path.join(folder, "weights")
    os.makedirs(folder)
    nasty(report, folder)
    faults(report, folder)
    references(report, folder)
    round_trips(report, folder)
    full_disk(report, folder)
    fine_tune(report, folder)
    bytes_read(report, folder, quick)
