"""What a card computes, against the same on the processor. `ISOREG_DEVICE=cpu` runs the tests dry where no card is."""

import contextlib
import copy
import os

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, TrainingArguments

from isoreg.fisher import empirical_fisher
from isoreg.geometry import two_nn
from isoreg.isoscore import isoscore
from isoreg.istar import CosReg, IStar, check_batches
from isoreg.dropout import apply_dropout
from isoreg.trainer import PenaltyTrainer

DEVICE = os.environ.get("ISOREG_DEVICE", "cuda")
HERE = DEVICE == "cpu" or torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU, or ISOREG_DEVICE=cpu")]
SHAPE = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
PENALTIES = {
    "istar": lambda: IStar(0.5, reference_cov=torch.eye(32)),
    "ustat": lambda: IStar(-0.5, correction="ustat"),
    "mean": lambda: IStar(0.5, zeta=0, layers="mean"),
    "cosreg": lambda: CosReg(),
}


def states(dtype=torch.float32):
    torch.manual_seed(0)
    mask = torch.ones(8, 20, dtype=torch.long)
    mask[3, 9:] = 0
    return [torch.randn(8, 20, 32).mul(torch.linspace(0.3, 2, 32)).to(dtype) for _ in range(4)], mask


def rows(n=48):
    torch.manual_seed(1)
    ids = torch.randint(5, 99, (n, 12))
    return [dict(input_ids=i, attention_mask=torch.ones_like(i), labels=int(i[0] > 50)) for i in ids]


def term_and_gradients(penalty, hidden, mask, device):
    hidden = [h.to(device).requires_grad_() for h in hidden]
    term = penalty.to(device)(tuple(hidden), mask.to(device))
    check_batches(penalty)
    return term.cpu(), [None if g is None else g.cpu() for g in torch.autograd.grad(term, hidden, allow_unused=True)]


@pytest.mark.parametrize("n, d", [(500, 64), (40, 300)])
@pytest.mark.parametrize("correction", [None, "gaussian", "ustat"])
def test_score_and_gradient(n, d, correction):
    torch.manual_seed(0)
    x = torch.randn(n, d) * torch.linspace(0.3, 2, d)
    exact = x.double().requires_grad_()
    ours = x.to(DEVICE).requires_grad_()
    a, b = isoscore(exact, correction=correction), isoscore(ours, correction=correction)
    torch.testing.assert_close(b.cpu().double(), a, rtol=1e-4, atol=1e-6)
    (g,), (h,) = torch.autograd.grad(a, exact), torch.autograd.grad(b, ours)
    torch.testing.assert_close(h.cpu().double(), g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", PENALTIES)
def test_penalty_and_gradient(kind, dtype):
    hidden, mask = states(dtype)
    ours, gradients = term_and_gradients(PENALTIES[kind](), hidden, mask, DEVICE)
    exact, wanted = term_and_gradients(PENALTIES[kind](), [h.double() for h in hidden], mask, "cpu")
    torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=1e-6)
    digits = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}[dtype]
    for g, h in zip(wanted, gradients):
        if g is not None:
            torch.testing.assert_close(h.double(), g, rtol=digits, atol=digits * float(g.abs().max()))


def test_the_mask_may_lie_on_the_processor():
    hidden, mask = states()
    penalty = IStar(0.5, zeta=0)
    term = penalty(tuple(h.to(DEVICE) for h in hidden), mask)
    torch.testing.assert_close(term.cpu(), penalty(tuple(hidden), mask), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", PENALTIES)
def test_a_step_waits_for_nothing(kind):
    hidden, mask = states()
    hidden, mask = [h.to(DEVICE).requires_grad_() for h in hidden], mask.to(DEVICE)
    penalty = PENALTIES[kind]().to(DEVICE)
    penalty(tuple(hidden), mask).backward()  # the first step may set something up
    waits = contextlib.nullcontext()
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        waits = contextlib.ExitStack()
        waits.callback(torch.cuda.set_sync_debug_mode, "default")
    with waits:
        penalty(tuple(hidden), mask).backward()
    check_batches(penalty)


@pytest.mark.parametrize("level", ["tensor", "diagonal"])
def test_fisher(level):
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SHAPE)).eval()
    labels = torch.randint(5, 99, (8, 12))
    batch = dict(input_ids=torch.randint(5, 99, (8, 12)), attention_mask=torch.ones(8, 12).long(), labels=labels)
    exact = empirical_fisher(copy.deepcopy(model).double(), [batch], level, "mlm").scores()
    there = {n: t.to(DEVICE) for n, t in batch.items()}
    ours = empirical_fisher(model.to(DEVICE), [there], level, "mlm").scores()
    for name, value in exact.items():
        assert ours[name] == pytest.approx(value, rel=1e-3), name


def test_intrinsic_dimension():
    torch.manual_seed(0)
    plane = torch.randn(1500, 5) @ torch.randn(5, 40)
    assert float(two_nn(plane.to(DEVICE))) == pytest.approx(float(two_nn(plane.double())), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training(precision, tmp_path):
    if DEVICE == "cpu" and precision == "fp16":
        pytest.skip("fp16 needs a GPU")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    apply_dropout(model, "constant", p=0.05)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=8, logging_steps=2, report_to=[], disable_tqdm=True,
        use_cpu=DEVICE == "cpu", bf16=precision == "bf16", fp16=precision == "fp16", save_strategy="no",
    )  # fmt: skip
    trainer = PenaltyTrainer(model, arguments, train_dataset=rows(), penalty=IStar(0.1, correction="ustat"))
    trainer.train()
    seen = [entry["isoscore"] for entry in trainer.state.log_history if "isoscore" in entry]
    assert len(seen) == 3 and all(0 < s < 1 for s in seen)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
