"""Rates are set, seen and undone; noise has its moments; Mixout its expectation; what was done survives a file."""

import copy
import json
import math
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from small_models import EVERY, make, output, rates, scores_of
from torch import nn

from isoreg.dropout import _noisy_attention, apply_dropout, gaussian_dropout, load_dropout, mix_weights, mixout
from isoreg.dropout import set_dropout
from isoreg.schedules import released_schedule, save_schedule
from isoreg.sites import dropout_sites, set_rate


def clean(model):
    "Whether no noise and no weight of a pass is left on a model."
    return not any({"forward", "weight"} & vars(m).keys() for m in model.modules())


@pytest.mark.parametrize("name,attention", EVERY)
def test_every_rate_arrives_where_it_should(name, attention, monkeypatch):
    model = make(name, attention).train()
    sites = dropout_sites(model)
    wanted = {s.name: round(0.01 * (i + 1), 2) for i, s in enumerate(sites)}
    applied = set_dropout(model, wanted)
    seen = []  # an independent record: the functions themselves are replaced
    plain, fused = F.dropout, F.scaled_dot_product_attention

    def dropout(x, p=0.5, training=True, inplace=False):
        seen.append(p)
        return plain(x, p, training)

    def attend(*a, dropout_p=0.0, **k):
        seen.append(dropout_p)
        return fused(*a, dropout_p=dropout_p, **k)

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    output(model)
    assert Counter(seen) == Counter({wanted[s.name]: s.calls for s in sites}) and applied["calls"] == len(seen)
    assert json.loads(json.dumps(applied))["rates"] == wanted


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert"])
def test_undo_and_context_manager_put_everything_back(name):
    model = make(name, attention_dropout=0.0) if name == "modernbert" else make(name)
    before, config = rates(model), model.config.to_dict()
    modules = {n: (id(m), type(m)) for n, m in model.named_modules()}
    outer = set_dropout(model, {n: 0.2 for n in before})
    with pytest.raises(KeyError):
        with set_dropout(model, {n: 0.33 for n in before}) as applied:
            assert set(rates(model).values()) == {0.33} == set(applied["rates"].values())
            raise KeyError
    assert set(rates(model).values()) == {0.2}
    assert model.config.dropout_schedule == {"kind": "rates", "rates": {n: 0.2 for n in before}}
    outer.undo()
    outer.undo()
    assert rates(model) == before and model.config.to_dict() == config
    assert {n: (id(m), type(m)) for n, m in model.named_modules()} == modules


@pytest.mark.parametrize("first,second", [("guided", "gaussian"), ("mixout", "constant")])
def test_undo_takes_later_changes_of_the_model_back_too(first, second):
    model, other = make(), make()
    before, config = rates(model), model.config.to_dict()
    below = apply_dropout(model, first, **arguments(first, model))
    top = apply_dropout(model, second, **arguments(second, model))
    elsewhere = apply_dropout(other, "constant", p=0.4)  # a change of another model lies on nothing here
    below.undo()
    top.undo()  # does nothing any more
    assert rates(model) == before and model.config.to_dict() == config and clean(model)
    assert rates(other)["embeddings"] == 0.4
    elsewhere.undo()
    assert rates(other) == before


def test_a_failed_check_names_the_site_and_leaves_the_model_alone():
    class Floored(nn.Dropout):
        def forward(self, x):
            return F.dropout(x, max(self.p, 0.05), self.training)

    model = make("bert", "sdpa")
    model.bert.encoder.layer[1].output.dropout = Floored(0.1)
    before, config = rates(model), model.config.to_dict()
    message = "encoder.layer.1.ffn_output.*p=0.02 was set, p=0.05 of a Bernoulli mask was applied"
    with pytest.raises(RuntimeError, match=message):
        set_dropout(model, {n: 0.02 for n in before})
    assert rates(model) == before and model.config.to_dict() == config


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert", "gpt2"])
def test_the_schedule_travels_with_the_model(name, tmp_path):
    model = make(name)
    wanted = {n: round(0.01 * (i + 1), 2) for i, n in enumerate(rates(model))}
    set_dropout(model, wanted)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dropout_schedule"] == {"kind": "rates", "rates": wanted}
    loaded = type(model).from_pretrained(tmp_path)
    assert rates(loaded) == rates(make(name)) != wanted  # plain loading gives the rates of the global fields
    applied = load_dropout(loaded)
    assert rates(loaded) == wanted
    applied.undo()
    base = load_dropout(type(model.base_model).from_pretrained(tmp_path))  # without the head
    assert base["rates"] == {n: p for n, p in wanted.items() if n != "classifier"}


def saved(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).train()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("p", [0.2, None])
def test_gaussian_dropout_comes_back_as_noise(p, released, tmp_path):
    model = make(hidden_dropout_prob=0.3)
    own = rates(model)
    noise = gaussian_dropout(model, p, released=released)
    raised = set_dropout(model, {"embeddings": 0.4}, partial=True)  # the noise stays noise
    loaded = saved(model, tmp_path)
    before = loaded.config.to_dict()
    applied = load_dropout(loaded)
    assert model.config.dropout_schedule["kind"] == ("gaussian-released" if released else "gaussian")
    assert rates(loaded) == rates(model) == applied["rates"] and rates(loaded)["embeddings"] == 0.4
    torch.manual_seed(0)
    x = loaded.bert.embeddings.dropout(torch.ones(200_000))
    assert x.std() == pytest.approx(0.4 / 0.6 if released else math.sqrt(0.4 / 0.6), rel=0.02)
    applied.undo()
    assert loaded.config.to_dict() == before and clean(loaded)
    raised.undo()
    noise.undo()
    assert rates(model) == own and not hasattr(model.config, "dropout_schedule")


def test_mixout_is_refused_after_loading_and_put_on_as_the_message_says(tmp_path):
    model, loaded = make(), make()
    done = mixout(model, 0.6)
    for q in model.parameters():
        q.data.mul_(1.1)
    with pytest.raises(ValueError, match="Mixout, whose pretrained weights are not in its file; load .* call mixout"):
        load_dropout(saved(model, tmp_path))
    mixout(loaded, 0.6)
    loaded.load_state_dict(model.state_dict())
    assert rates(loaded) == rates(model) and loaded.config.dropout_schedule == model.config.dropout_schedule
    torch.manual_seed(3)
    there = output(model.train())
    torch.manual_seed(3)
    torch.testing.assert_close(output(loaded.train()), there)  # the same draws
    done.undo()
    assert not hasattr(model.config, "dropout_schedule")


# Gaussian dropout
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("released", [False, True])
def test_gaussian_moments(attention, released, p=0.1):
    model = make("bert", attention, num_hidden_layers=1)
    gaussian_dropout(model, p, released=released)
    std = p / (1 - p) if released else math.sqrt(p / (1 - p))
    torch.manual_seed(0)
    for training in (True, False):
        model.train(training)
        on = training or released
        x = model.bert.embeddings.dropout(torch.full((200_000,), 2.0)) / 2
        assert abs(x.mean() - 1) < 0.01 and x.std() == pytest.approx(std * on, rel=0.02)
        layer = model.bert.encoder.layer[0].attention.self
        with torch.no_grad():
            noisy, exact = layer(torch.ones(40_000, 1, 16))[0], layer.value(torch.ones(1, 1, 16))
        factor = (noisy / exact)[:, 0, [0, -1]]  # one token: its probability is 1; one entry of each head
        assert abs(factor.mean() - 1) < 0.02 and factor.std() == pytest.approx(std * on, rel=0.03, abs=1e-5)
        assert model.training == training and layer.training == training


@pytest.mark.parametrize("name,attention", EVERY)
def test_gaussian_noise_reaches_every_site_and_leaves_again(name, attention):
    model = make(name, attention).train()
    rest = output(model.eval())
    sites = dropout_sites(model)
    noise = gaussian_dropout(model)
    for alone in sites:
        for s in sites:
            set_rate(model, s.handle, 0.3 * (s is alone))
        torch.manual_seed(0)
        assert not torch.equal(output(model.train()), output(model))
        torch.testing.assert_close(output(model.eval()), rest, rtol=0, atol=0)
    noise.undo()
    assert clean(model)


@pytest.mark.parametrize(
    "causal,mask,gqa", [(False, None, False), (True, None, False), (False, "bool", False), (False, "float", True)]
)
def test_noisy_attention_without_noise_is_the_fused_attention(causal, mask, gqa):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 2 if gqa else 4, 6, 8)
    keep = torch.rand(2, 1, 6, 6) > 0.4
    keep[0, 0, 2] = False if mask == "bool" else True
    m = None if mask is None else keep if mask == "bool" else torch.randn(2, 1, 6, 6)
    given = dict(attn_mask=m, is_causal=causal, enable_gqa=gqa)
    ours = _noisy_attention(0.0, False, query, key, value, **given)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, **given))


@pytest.mark.parametrize("p", [None, 0.2])
def test_a_mask_that_noise_cannot_replace_is_refused_by_name(p):
    model = make()
    model.bert.encoder.layer[1].output.dropout = nn.AlphaDropout(0.1)
    before, config = rates(model), model.config.to_dict()
    with pytest.raises(ValueError, match="encoder.layer.1.output.dropout' is inside a kernel"):
        gaussian_dropout(model, p)
    assert rates(model) == before and model.config.to_dict() == config and clean(model)
    model = make()
    gaussian_dropout(model, p)
    model.bert.encoder.layer[1].output.dropout = nn.Dropout(0.1)  # a mask that comes after the noise
    with pytest.raises(RuntimeError, match="encoder.layer.1.ffn_output.*Bernoulli"):
        set_dropout(model, {"encoder.layer.1.ffn_output": 0.2}, partial=True)


def test_noise_follows_an_identity_that_becomes_a_dropout():
    model = make("modernbert", attention_dropout=0.0, embedding_dropout=0.0, mlp_dropout=0.0).train()
    before = rates(model)
    names = [n for n in before if n != "classifier"]
    with gaussian_dropout(model, 0.2):
        assert list(rates(model)) == list(before) and not torch.equal(output(model), output(model))
    noise = gaussian_dropout(model)
    assert rates(model) == before
    set_dropout(model, {n: 0.2 for n in names})  # looks for noise at each
    layer = model.model.embeddings.drop
    x = layer(torch.ones(50_000))
    assert isinstance(layer, nn.Dropout) and x.std() == pytest.approx(0.5, rel=0.03)
    noise.undo()
    assert model.model.embeddings.drop(torch.ones(1000)).unique().tolist() == [1.0]  # rate 0, as before the noise


# Mixout
@pytest.mark.parametrize("p", [0.3, 0.9])
def test_mixout_expectation_values_and_gradient(p):
    torch.manual_seed(0)
    w, u = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 6, dtype=torch.float64)
    draws = torch.stack([mix_weights(w, u, p) for _ in range(4000)])
    spread = (w - u).abs() * math.sqrt(p / (1 - p))  # of one draw
    assert ((draws.mean(0) - w).abs() < 5 * spread / math.sqrt(4000)).all()
    replaced = torch.isclose(draws, u)
    assert (replaced | torch.isclose(draws, (w - p * u) / (1 - p))).all()
    assert abs(float(replaced.double().mean()) - p) < 0.02
    assert (replaced == replaced[:, :1]).all()  # whole columns
    (grad,) = torch.autograd.grad(draws[0].sum(), w)
    torch.testing.assert_close(grad, (~replaced[0]).double() / (1 - p))
    assert torch.equal(mix_weights(w, u, 0.0), w)


def test_mixout_at_zero_is_the_identity_to_the_bit_and_at_the_start_too():
    model = make("bert", "sdpa").train()
    with set_dropout(model, {n: 0.0 for n in rates(model)}):
        plain = output(model)
    for p in (0.0, 0.7):
        with mixout(model, p), set_dropout(model, {"classifier": 0.0}, partial=True):
            assert torch.equal(output(model), plain)
            for second in (mixout, gaussian_dropout):
                with pytest.raises(ValueError, match="model: has mixout noise already; undo it first"):
                    second(model)
    assert clean(model)


@pytest.mark.parametrize("name,maps", [("bert", 12), ("gpt2", 8), ("albert", 7), ("modernbert", 8)])
def test_mixout_mixes_the_maps_of_the_encoder_only(name, maps):
    model = make(name).train()
    state = list(model.state_dict())
    applied = mixout(model)
    own = rates(make(name))
    assert applied["mixed"] == maps and applied["mean"] == 0
    assert applied["rates"].get("classifier") == own.get("classifier")
    for q in model.parameters():
        q.data.mul_(1.01)
    assert not torch.equal(output(model), output(model))
    assert torch.equal(output(model.eval()), output(model))  # off in eval
    assert list(model.state_dict()) == state
    applied.undo()
    assert rates(model) == own and clean(model)


# one function for a training run
def batch(n=4):
    torch.manual_seed(5)
    ids = torch.randint(3, 99, (n, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(n) % 2}


def train(model, steps=3, autocast=False):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def arguments(how, model):
    if how == "constant":
        return {"p": 0.2}
    return {"scores": scores_of(model)} if how == "guided" else {}


def test_sites_that_did_not_drop_before_are_counted():
    models = make("llama", attention_dropout=0.0), make()
    first, second = (apply_dropout(m, "guided", scores=scores_of(m)) for m in models)
    assert first["notes"][1:] == ["1 of 2 sites drop now and did not before"] and len(second["notes"]) == 1


def test_standard_takes_out_the_note_of_rates_that_are_not_in_force(tmp_path):
    "A second training, with the model's own rates, from a checkpoint of a guided one."
    model = make()
    set_dropout(model, dict.fromkeys(rates(model), 0.03))
    model.save_pretrained(tmp_path)
    kept = copy.deepcopy(model.config.dropout_schedule)
    assert apply_dropout(model, "standard")["mean"] > 0 and model.config.dropout_schedule == kept  # in force
    again = type(model).from_pretrained(tmp_path)
    done = apply_dropout(again, "standard")
    assert "dropout_schedule of an earlier training, not in force, taken out" in done["notes"]
    with pytest.raises(ValueError, match="has no dropout_schedule"):
        load_dropout(again)
    done.undo()
    assert load_dropout(again)["rates"] == load_dropout(model)["rates"]
    again = type(model).from_pretrained(tmp_path)
    load_dropout(again)
    assert "taken out" not in str(apply_dropout(again, "standard")["notes"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("how", ["standard", "constant", "guided", "gaussian", "gaussian-released", "mixout"])
def test_every_way_trains_under_autocast_and_can_be_saved_copied_and_undone(how, attention, tmp_path):
    model = make("bert", attention)
    names, before = list(model.state_dict()), rates(model)
    report = apply_dropout(model, how, **arguments(how, model))
    assert report["how"] == how and json.loads(json.dumps(report)) == report and report["rates"]["classifier"] == 0.1
    assert copy.deepcopy(report) == dict(report) == pickle.loads(pickle.dumps(report))
    assert rates(model) == report["rates"]
    assert (model.config.to_dict() == make("bert", attention).config.to_dict()) == (how == "standard")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert list(twin.state_dict()) == names == [n for n in model.state_dict()]
    plain = train(model)
    for other in [twin] + [make("bert", attention)] * (how == "standard"):  # which is the untouched model
        for a, b in zip(plain.values(), train(other).values()):
            assert torch.equal(a, b)  # the copy has the same regulariser
    half = train(model, autocast=True)
    assert all(torch.isfinite(t).all() for t in half.values())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)  # plain transformers
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    report.undo()
    assert rates(model) == before and clean(model)


@pytest.mark.parametrize("how", ["gaussian", "gaussian-released", "mixout", "constant"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_checkpointing_gives_the_same_gradients(how, attention):
    gradients = []
    for checkpointing in (False, True):
        model = make("bert", attention).train()
        apply_dropout(model, how, **arguments(how, model))
        for p in model.parameters():
            p.data.mul_(1.05)
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        on = [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        assert any(on) == checkpointing
        dropout_sites(model)  # a look does not switch it off
        assert on == [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        torch.manual_seed(2)
        model(**batch()).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def test_schedules_and_files_in_place_of_a_name(tmp_path):
    plan = {n: 0.07 for n in rates(make()) if n != "classifier"}
    path = save_schedule(tmp_path / "s.json", plan)
    for how in (plan, path, str(path)):
        assert apply_dropout(make(), how)["rates"] == plan | {"classifier": 0.1}
    assert apply_dropout(make(), {**plan, "classifier": 0.3})["rates"]["classifier"] == 0.3  # by name it can be set


@pytest.mark.parametrize(
    "how,kwargs,message",
    [
        ("giuded", {}, "did you mean 'guided'"),
        (3, {}, "how: 3"),
        ("guided", {}, "scores: guided needs them"),
        ("guided", {"p": 0.1, "scores": {"a": 1.0}}, "p: has no meaning for guided"),
        ("standard", {"p": 0.1}, "use constant"),
        ("constant", {}, "p: None is not a number"),
        ("gaussian", {"scores": {"a": 1.0}}, "takes none; guided and its controls do"),
        ({"embeddings": 0.1}, {"scores": {"a": 1.0}}, "takes none; guided and its controls do"),
        ("constant", {"p": 1.0}, "is out of range"),
        ("mixout", {"p": 1.2}, "is out of range"),
        ("missing.json", {}, "missing.json"),
        ("guided", {"scores": {"a": 1.0}}, "tensors have no score"),
        ({"embeddings": 1.0}, {}, r"embeddings.*1.0 is out of range"),
        ({"embeddings": float("nan")}, {}, "is out of range"),
        ({"embeddings": "0.1"}, {}, "is not a number"),
        ({}, {}, "no mapping"),
        ({"embedings": 0.1}, {}, "did you mean 'embeddings'"),
        ({"embeddings": 0.1}, {}, "6 sites have no rate"),
        (released_schedule(), {}, "no sites of this model.*another model"),  # twelve layers on two
    ],
)
def test_bad_calls_change_nothing(how, kwargs, message):
    model = make()
    before, config = rates(model), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        apply_dropout(model, how, **kwargs)
    assert rates(model) == before and model.config.to_dict() == config


def test_models_of_ones_own():
    class InPlace(nn.Linear):
        drop = 0.0

        def forward(self, x):
            y = super().forward(x)
            F.dropout(y, self.drop, self.training, inplace=True)
            return y

    x, model = torch.randn(3, 4), InPlace(4, 4)
    model.drop = 0.2
    with gaussian_dropout(model, 0.3, batch=x):
        assert not torch.equal(model(x), model(x))
    first = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'0' comes before all weights"):
        apply_dropout(first, "guided", scores={"1.weight": 1.0, "1.bias": 1.0}, batch=x)
    with pytest.raises(ValueError, match="has no nn.Linear to mix"):
        mixout(nn.Sequential(nn.Conv1d(3, 3, 1), nn.Dropout(0.1)), batch=x[None])


def test_a_compiled_model_that_has_run_gets_the_regulariser():
    model = make("bert", hidden_dropout_prob=0.3).train()
    compiled, inputs = torch.compile(model, backend="eager"), {k: v for k, v in batch().items() if k != "labels"}
    with torch.no_grad():
        assert not torch.equal(compiled(**inputs).logits, compiled(**inputs).logits)
        done = gaussian_dropout(compiled, released=True)
        compiled.eval()  # its noise stays at evaluation
        assert not torch.equal(compiled(**inputs).logits, compiled(**inputs).logits)
        done.undo()
        assert torch.equal(compiled(**inputs).logits, compiled(**inputs).logits)


@pytest.mark.parametrize("how", ["gaussian", "gaussian-released", "mixout"])
def test_an_interruption_within_a_pass_leaves_nothing_on(how):
    model, other, inputs = make("bert", "sdpa").eval(), nn.Dropout(0.5).train(), batch()
    before = model(**inputs).logits
    done = apply_dropout(model, how, p=0.3)
    layer = model.bert.encoder.layer[1]
    inside = layer.attention.output.dense if how == "mixout" else layer.attention.self.query
    wait = lambda *call: (_ for _ in ()).throw(KeyboardInterrupt)
    handle = inside.register_forward_hook(wait, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model.train(how != "gaussian-released")(**inputs)
    handle.remove()
    assert set(other(torch.ones(1000)).tolist()) == {0.0, 2.0}  # no noise in another module
    assert not any("weight" in vars(m) for m in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    done.undo()
    assert torch.equal(model.eval()(**inputs).logits, before)
