"""What must stay the same to the bit while the code is rewritten: keys, toy runs, Fisher sums, a surface, gradients.

`python tools/golden.py OUT.json` writes it, in about two minutes on one core. `python tools/golden.py A.json B.json`
says what differs and ends with 1 if anything does. Bits depend on the processor, so both files are of one machine.
Where `isoreg` lies is the business of PYTHONPATH: one script serves this commit and others.
"""

import hashlib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

NBS = Path(__file__).resolve().parents[1] / "nbs"
KINDS = {"fisher": "FisherConfig", "landscape": "LandscapeConfig", "geometry": "GeometryConfig"}
NEAR = {"fisher/": 1e-6}  # relative, as products over samples add up in another order; the rest is equal to the bit
RUNS = {  # settings of a penalty, schemes of dropout
    "none": ({"regularizer": "none"}, ["standard", "guided", "constant", "gaussian", "mixout"]),
    "istar": ({"regularizer": "istar", "lam": -0.1}, ["standard", "guided", "gaussian-released"]),
    "cosreg": ({"regularizer": "cosreg", "lam": 0.1}, ["standard", "guided"]),
    "ustat": ({"regularizer": "istar", "lam": 0.1, "correction": "ustat"}, ["standard", "mixout"]),
}
RATES = {"constant": 0.05, "gaussian": 0.1, "gaussian-released": 0.1, "mixout": 0.5}
TINY = {
    "bert": (
        "mlm",
        "Bert",
        "ForMaskedLM",
        "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=32",
    ),
    "gpt2": ("clm", "GPT2", "LMHeadModel", "n_embd=16 n_layer=2 n_head=2 n_positions=32"),
    "t5": ("seq2seq", "T5", "ForConditionalGeneration", "d_model=16 d_kv=8 d_ff=32 num_layers=2 num_heads=2"),
}


def named(room, name):
    "A name of a room, wherever the room is."
    for place in (f"isoreg.experiments.{room}", f"isoreg.{room}"):
        try:
            return getattr(importlib.import_module(place), name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(room)


def digest(tensors):
    "A digest of named tensors."
    found = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        found.update(f"{name}{tuple(t.shape)}{t.dtype}".encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def keys(folder):
    "The key of each stored record, recomputed from its configuration in a folder that has what it names."
    os.chdir(folder)
    for name in ("data", "base-data"):
        Path(name).mkdir()
    Path("nbs").symlink_to(NBS)
    found = {}
    for file in sorted((NBS / "results").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            config, place = named("config", KINDS.get(record.get("kind"), "RunConfig")), record["config"].get("fisher")
            if place:
                Path(place).mkdir(parents=True, exist_ok=True)
                (Path(place) / "record.json").write_text('{"tensor_scores": {"a": 1.0}}')
            found[record["key"]] = config.from_record(record["config"]).key
    return found


def toy_run(penalty, dropout):
    "Losses, score and final weights of a short run."
    settings = dict(task="toy-cola", max_train=64, max_eval=32, epochs=2, precision="fp32", dropout=dropout, **penalty)
    if dropout in RATES:
        settings["dropout_p"] = RATES[dropout]
    config = named("config", "RunConfig")(**settings)
    with tempfile.TemporaryDirectory() as folder:
        record = named("finetune", "run")(config, model_folder=Path(folder) / "model").to_dict()
        weights = load_file(Path(folder) / "model" / "model.safetensors")
    names = ("value", "predictions", "isoscore", "geometry", "loss", "resampled")
    return {"weights": digest(weights)} | {n: record[n] for n in names}


def tiny(name):
    "A small language model of fixed weights, and three batches of four texts, one of them padded."
    loss, family, head, words = TINY[name]
    torch.manual_seed(0)
    settings = {
        k: int(v) for k, v in (word.split("=") for word in f"vocab_size=99 decoder_start_token_id=0 {words}".split())
    }
    model = getattr(transformers, family + head)(getattr(transformers, family + "Config")(**settings))
    draw, batches = torch.Generator().manual_seed(1), []
    for _ in range(3):
        ids = torch.randint(5, 99, (4, 12), generator=draw)
        mask = (torch.arange(12) < torch.tensor([12, 9, 7, 12])[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        asked = torch.rand(4, 12, generator=draw) < 0.4
        if loss == "mlm":
            labels, ids = labels.masked_fill(~asked, -100), ids.masked_fill(asked, 4)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return model, batches, loss


def fisher(name):
    "Sums by tensor, and totals of the diagonal."
    model, batches, loss = tiny(name)
    estimate = named("fisher", "empirical_fisher")
    by_tensor, scalars = (estimate(model, batches, level=level, loss=loss).sums for level in ("tensor", "diagonal"))
    sums = {n: float(s) for n, s in by_tensor.items()}
    totals = {n: float(s.double().sum()) for n, s in scalars.items()}
    return {"tensor": sums, "diagonal": totals}


def orthogonal(model, seed, other):
    "A direction whose filters are orthogonal to those of another, as the library had it."
    found = {}
    for n, o in other.items():
        stream = int.from_bytes(hashlib.sha256(f"{seed}/{n}".encode()).digest()[:8], "little") >> 1
        w, o = model.get_parameter(n).detach().flatten(1), o.flatten(1)
        d = torch.randn(o.shape, generator=torch.Generator().manual_seed(stream))
        for _ in range(2):
            d = d - (d * o).sum(1, keepdim=True) / o.square().sum(1, keepdim=True).clamp(min=1e-30) * o
        longs = [torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64) for x in (w, d)]
        found[n] = (d * (longs[0] / (longs[1] + 1e-10)).to(d.dtype)).view_as(model.get_parameter(n))
    return found


def surface():
    "Losses of a small plane around the tiny BERT."
    model, batches, loss = tiny("bert")
    one = named("landscape", "direction")(model, seed=0)
    plane = one, orthogonal(model, 1, one)
    return named("landscape", "loss_surface")(model, batches, *plane, alphas=[-0.5, 0, 0.5], loss=loss).losses.tolist()


def gradients():
    "Value and gradient of each penalty on fixed states, one layer of them padded."
    IStar, CosReg = named("istar", "IStar"), named("istar", "CosReg")
    draw = torch.Generator().manual_seed(2)
    states = [torch.randn(4, 10, 8, generator=draw) * torch.arange(1, 9) for _ in range(4)]
    mask = (torch.arange(10) < torch.tensor([10, 6, 8, 10])[:, None]).long()
    reference = torch.randn(30, 8, generator=draw).T.cov()
    given = dict(reference_cov=reference, zeta=0.2)
    penalties = {
        "istar": IStar(-0.1, **given),
        "text": IStar(0.1, convention="text", **given),
        "plain": IStar(0.1, zeta=0.0),
        "padding": IStar(0.1, padding=True, embeddings=True, **given),
        "mean": IStar(0.1, zeta=0.0, layers="mean"),
        "last": IStar(0.1, layers=-1, **given),
        **{name: IStar(0.1, correction=name) for name in ("gaussian", "ustat")},
        "cosreg": CosReg(0.1),
    }
    found = {}
    for name, penalty in penalties.items():
        leaves = tuple(h.clone().requires_grad_() for h in states)
        (value := penalty(leaves, mask)).backward()
        found[name] = [float(value), digest({str(k): h.grad for k, h in enumerate(leaves) if h.grad is not None})]
    return found


def flat(x, path=""):
    "The leaves of nested dicts and lists by path."
    if not isinstance(x, (dict, list)):
        return {path: x}
    parts = x.items() if isinstance(x, dict) else enumerate(x)
    return {p: v for k, part in parts for p, v in flat(part, f"{path}/{k}" if path else str(k)).items()}


def compare(a, b):
    "Print the paths at which two files differ; return how many there are."
    a, b, differ = flat(a), flat(b), []
    for path in {**a, **b}:
        if path.startswith("fisher/") and path.endswith("/digest"):
            continue  # in files of earlier commits
        one, two = a.get(path, "missing"), b.get(path, "missing")
        near = next((x for start, x in NEAR.items() if path.startswith(start)), None)
        if one != two and (near is None or "missing" in (one, two) or abs(one - two) > near * abs(one)):
            differ.append(f"{path}: {one} -> {two}")
    print(*differ[:40], f"{len(differ)} of {len({**a, **b})} values differ", sep="\n")
    return len(differ)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(bool(compare(*(json.loads(Path(name).read_text()) for name in sys.argv[1:]))))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    runs = {f"{n}-{d}": toy_run(penalty, d) for n, (penalty, schemes) in RUNS.items() for d in schemes}
    sums = {name: fisher(name) for name in TINY}
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        recomputed = keys(folder)
        os.chdir(out.parent)
    found = {"keys": recomputed, "runs": runs, "fisher": sums, "surface": surface(), "gradients": gradients()}
    out.write_text(json.dumps(found, indent=1) + "\n")
