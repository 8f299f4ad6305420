"""The toy language: labels, determinism, separation of train and validation, and the shipped model."""

import hashlib
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from isoreg.experiments import toy
from isoreg.experiments.toy import KIND_OF, MONOTONE, NP, TOY_SIZES, TOY_TASKS
from isoreg.experiments.toy import Clause, draw, side
from isoreg.experiments.toy import text, toy_corpus, toy_model_path, toy_pairs, toy_task, toy_tokenizer

DIGEST = "f7831632a90f347d0bba9bce806f8d20d1cb1b2ab9177833946d8599dd729fce"
seeds = st.integers(0, 10**6).map(random.Random)
VOCABULARY = toy_tokenizer().get_vocab().keys()
texts = lambda rows: {v for r in rows for k, v in r.items() if k.startswith("sentence")}


@given(seeds)
@settings(max_examples=200, deadline=None)
def test_every_word_is_in_the_vocabulary_and_sentences_fit(rng):
    sentence = text(draw(rng).words())
    words = sentence.removesuffix(".").split()
    assert set(words) <= VOCABULARY and sentence.endswith(".") and 3 <= len(words) <= 31


QUANTIFIERS = dict.fromkeys(("a", "some", "one"), lambda n, v: bool(n & v))
QUANTIFIERS |= dict.fromkeys(("every", "each", "all"), lambda n, v: n <= v)
QUANTIFIERS |= {
    "two": lambda n, v: len(n & v) >= 2,
    "three": lambda n, v: len(n & v) >= 3,
    "no": lambda n, v: not n & v,
}
SETS = [frozenset(i for i in range(3) if k >> i & 1) for k in range(8)]


@pytest.mark.parametrize("det", QUANTIFIERS)
def test_monotonicity_table_against_all_sets_of_three(det):
    """Each sign of the table holds for all sets; each opposite sign fails for some."""
    q, pairs = QUANTIFIERS[det], [(a, b) for a in SETS for b in SETS if a <= b]
    noun, verb = MONOTONE[det]
    for sign, at in ((noun, lambda s, other: q(s, other)), (verb, lambda s, other: q(other, s))):
        up = all(not at(a, s) or at(b, s) for a, b in pairs for s in SETS)
        down = all(not at(b, s) or at(a, s) for a, b in pairs for s in SETS)
        assert sign == (1 if up else -1 if down else 0) != 0


def holds(clause, world):
    "Truth of a sentence with an intransitive verb in a world that says which animal has which property."
    has = lambda word: {i for i, properties in enumerate(world) if word in properties}
    below = lambda noun: {noun} | {n for low in [w for w, k in KIND_OF.items() if k == noun] for n in below(low)}
    noun = set().union(*(has(n) for n in below(clause.subject.noun)))
    noun &= has(clause.subject.adj) if clause.subject.adj else noun
    verb = has(clause.verb) & (has(clause.adverb) if clause.adverb else has(clause.verb))
    verb = set(range(len(world))) - verb if clause.negated else verb
    return QUANTIFIERS[clause.subject.det](noun, verb)


@given(seeds, st.sampled_from(["a", "every", "no"]), st.booleans(), st.sampled_from(["subject", "rest"]))
@settings(max_examples=60, deadline=None)
def test_edits_entail_just_as_polarity_says(rng, det, general, part):
    clause = Clause(NP(det, "dog", False, adj="old"), "sleep", adverb="quietly" if general else "")
    if not general:
        clause = replace(clause, subject=replace(clause.subject, adj=""))
    other = toy.edit(clause, part, general, rng)
    if other is None or other.place or other.subject.place or other.subject.rel:
        return
    words = "dog animal poodle beagle cat old sleep quietly".split()
    words += [other.subject.adj or "old", other.adverb or "quietly"]
    worlds = [[{w for w in words if rng.random() < 0.6} for _ in range(3)] for _ in range(1500)]
    entails = all(holds(other, w) for w in worlds if holds(clause, w))
    assert entails == (toy.polarity(clause)[part] == (1 if general else -1))


@pytest.mark.parametrize("name", TOY_TASKS)
def test_train_and_validation_share_no_sentence_for_any_seed(name):
    train = texts(toy_task(name, "train", 600, seed=1)) | texts(toy_task(name, "train", 300))
    held = texts(toy_task(name, "validation", 400)) | texts(toy_task(name, "validation", 200, seed=7))
    assert not train & held and {side(s) for s in train} == {"train"} and {side(s) for s in held} == {"validation"}
    assert not held & (set(toy_corpus(3000)) | {s for p in toy_pairs(1000) for s in p})


@pytest.mark.parametrize("name", TOY_TASKS)
def test_rows_are_unique_prefix_stable_and_seeded(name):
    rows = toy_task(name, "train", 300)
    assert len({tuple(v for k, v in r.items() if k.startswith("sentence")) for r in rows}) == 300
    assert toy_task(name, "train", 40).to_list() == rows.to_list()[:40]
    assert toy_task(name, "train", 40, seed=1).to_list() != rows.to_list()[:40]
    assert rows["idx"][:] == list(range(300))


def test_rows_are_those_of_the_stored_runs_in_any_process():
    "Records compare runs by these rows, so a digest of them is pinned. Each process hashes strings in another way."
    tokenizer = toy_tokenizer()
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    rows = [toy_task(n, s, 300, 1).to_list() for n in TOY_TASKS for s in TOY_SIZES]
    found = json.dumps([rows, toy_corpus(300), toy_pairs(200), words])
    assert hashlib.sha256(found.encode()).hexdigest() == DIGEST


def test_the_tokenizer_reads_words_and_segments():
    tokenizer = toy_tokenizer()
    a, b = toy_pairs(1)[0]
    batch = tokenizer(a, b)
    n = len(tokenizer(a)["input_ids"])
    assert tokenizer.unk_token_id not in batch["input_ids"] and tokenizer.model_max_length == 64
    assert batch["token_type_ids"] == [0] * n + [1] * (len(batch["input_ids"]) - n)
    assert tokenizer("A DOG sleeps.")["input_ids"] == tokenizer("a dog sleeps.")["input_ids"]
    assert tokenizer("a zebra sleeps.")["input_ids"].count(tokenizer.unk_token_id) == 1


def test_shipped_model_loads_offline_and_knows_agreement():
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

    folder, tokenizer = toy_model_path(), toy_tokenizer()
    model, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    classifier, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert all(k.startswith("cls.") for k in report["unexpected_keys"]) and classifier.config.hidden_dropout_prob == 0.1
    assert all(k.startswith(("classifier", "bert.pooler")) for k in report["missing_keys"])
    prefer = []
    for sentence, right, wrong in (
        ("the dog near these houses [MASK].", "sleeps", "sleep"),
        ("the dogs near this house [MASK].", "sleep", "sleeps"),
        ("two [MASK] sleep.", "cats", "cat"),
        ("every [MASK] sleeps.", "cat", "cats"),
    ):
        batch = tokenizer(sentence, return_tensors="pt")
        logits = model.eval()(**batch).logits[0, batch["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
        a, b = logits[tokenizer.convert_tokens_to_ids([right, wrong])]
        prefer.append(bool(a > b))
    assert all(prefer)
