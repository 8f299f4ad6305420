"""Measure the clouds of the chapter *What is isotropy?*: the sentence and token vectors of one encoder before and after
its training on masked words. `python tools/clouds.py ENCODER TRAINED TEXTS.parquet` writes nbs/results/clouds.json."""

import json
import sys
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModel, AutoTokenizer

from isoreg.isoscore import isoscore

OUT = Path(__file__).resolve().parents[1] / "nbs" / "results" / "clouds.json"
TEXTS, TOKENS, SHOWN, BATCH = 1000, 64, 300, 50


@torch.no_grad()
def vectors(folder: str, texts: list[str]) -> dict[str, torch.Tensor]:
    "Return the last layer's mean over each text, and as many tokens, one drawn from each text."
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    generator, found = torch.Generator().manual_seed(0), {"sentences": [], "tokens": []}
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[start : start + BATCH], truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
        )
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"]
        found["sentences"].append((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        place = (torch.rand(len(mask), generator=generator) * mask.sum(1)).long()
        found["tokens"].append(states[torch.arange(len(mask)), place])
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def described(points: torch.Tensor) -> dict:
    "Return score, corrected score, spectrum and a drawing of a cloud: some points on its two widest directions."
    centred = (points - points.mean(0)).double()
    _, stretch, directions = torch.linalg.svd(centred, full_matrices=False)
    spectrum = stretch.square() / stretch.square().sum()
    drawn = centred[:SHOWN] @ directions[:2].T / centred.square().sum(1).mean().sqrt()
    return {
        "isoscore": float(isoscore(points)),
        "corrected": float(isoscore(points, correction="ustat")),
        "directions": float(1 / spectrum.square().sum()),
        "points": len(points),
        "dimensions": points.shape[1],
        "spectrum": [round(float(s), 6) for s in spectrum],
        "drawn": [[round(float(x), 3) for x in point] for point in drawn],
    }


if __name__ == "__main__":
    before, after, source = sys.argv[1:]
    texts = pd.read_parquet(source).text.str.strip()
    texts = list(texts[texts.str.len() > 200].drop_duplicates().sample(TEXTS, random_state=0))
    found = {"texts": f"{TEXTS} paragraphs of the test part of WikiText-103, {TOKENS} tokens at most"}
    for name, folder in ("sentence encoder", before), ("after 500 steps on masked words", after):
        found[name] = {kind: described(points) for kind, points in vectors(folder, texts).items()}
    OUT.write_text(json.dumps(found) + "\n")
