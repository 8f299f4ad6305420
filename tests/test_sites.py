"""Dropout sites are found, named and verified by what a model does, and looking leaves no trace."""

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.modeling_utils
from small_models import EVERY, SMALL, make, output, rates, scores_of
from torch import nn

from isoreg.dropout import gaussian_dropout, set_dropout
from isoreg.dropout import site_scores
from isoreg.sites import dropout_sites, set_rate


@pytest.mark.parametrize("name,attention", EVERY)
def test_sites_have_the_kinds_of_the_architecture_and_unique_names(name, attention):
    sites = dropout_sites(make(name, attention))
    assert Counter(s.kind for s in sites) == SMALL[name][4]
    assert len({s.name for s in sites}) == len(sites)
    assert all(s.tensors and len(s.tensors) == len(s.sizes) for s in sites)


@pytest.mark.parametrize("name,attention", EVERY)
def test_each_site_alone_makes_two_passes_differ_and_none_makes_them_agree(name, attention):
    model = make(name, attention).train()
    sites = dropout_sites(model)
    names = [s.name for s in sites]
    for alone in [*names, None]:
        for s in sites:
            set_rate(model, s.handle, 0.6 * (s.name == alone))
        passes = [output(model) for _ in range(6)]  # a head with two units may keep both by chance
        assert any(not torch.equal(passes[0], p) for p in passes[1:]) == (alone is not None), alone


@pytest.mark.parametrize("name", [n for n in SMALL if SMALL[n][3] == 2])
def test_sites_and_tensors_do_not_depend_on_the_attention_implementation(name):
    bare = lambda attention: [(s.name, s.kind, s.p, s.tensors) for s in dropout_sites(make(name, attention))]
    assert bare("eager") == bare("sdpa")


HEADS = {
    "bert": "Model ForMaskedLM ForSequenceClassification ForQuestionAnswering ForTokenClassification",
    "roberta": "Model ForMaskedLM",
    "distilbert": "Model ForMaskedLM",
    "gpt2": "Model ForSequenceClassification",
    "t5": "ForConditionalGeneration ForSequenceClassification Model",
    "modernbert": "Model ForMaskedLM",
}


@pytest.mark.parametrize("name", HEADS)
def test_names_agree_between_heads(name):
    heads = HEADS[name].split()
    seen = [[(s.name, s.tensors) for s in dropout_sites(make(name, head=h)) if s.kind != "classifier"] for h in heads]
    assert all(other == seen[0] for other in seen)
    model = make(name, head=heads[0])
    assert all(set(site_scores(make(name, head=h), scores_of(model))) == {n for n, _ in seen[0]} for h in heads)


def test_released_grouping_of_bert_is_that_of_the_released_notebook():
    groups = {s.name: set(s.tensors) for s in dropout_sites(make())}
    both = lambda *modules: {f"{m}.{k}" for m in modules for k in ("weight", "bias")}
    layer = "encoder.layer.1."
    tables = {f"embeddings.{k}_embeddings.weight" for k in ("word", "position", "token_type")}
    assert groups["embeddings"] == tables | both("embeddings.LayerNorm")
    assert groups[layer + "attention_probs"] == both(*(f"{layer}attention.self.{k}" for k in ("query", "key", "value")))
    for site, place in (("attention_output", "attention.output"), ("ffn_output", "output")):
        assert groups[layer + site] == both(f"{layer}{place}.dense", f"{layer}{place}.LayerNorm")
    assert not any("intermediate" in t for g in groups.values() for t in g)


LAYER, PROJECTIONS = "encoder.layer.0.", "query key value pos_key pos_query".split()
OF_SITE = {
    ("gpt2", "h.0.attention_probs"): "h.0.attn.c_attn",
    ("gpt2", "h.0.attention_output"): "h.0.attn.c_proj",
    ("gpt2", "embeddings"): "wte wpe",
    ("t5", "encoder.block.0.layer.0.attention_output"): "encoder.block.0.layer.0.SelfAttention.o",
    ("t5", "decoder.embeddings"): "shared",
    ("mpnet", LAYER + "attention_output"): f"{LAYER}attention.attn.o {LAYER}attention.LayerNorm",
    ("deberta", LAYER + "attention_probs"): " ".join(LAYER + f"attention.self.{k}_proj" for k in PROJECTIONS),
    ("modernbert", "layers.0.attention_output"): "layers.0.attn.Wo",
}


@pytest.mark.parametrize("name, site", OF_SITE)
def test_tensors_of_modules_with_several_sites_are_shared_out(name, site):
    found = next(s for s in dropout_sites(make(name)) if s.name == site)
    assert {t.rpartition(".")[0] for t in found.tensors} == set(OF_SITE[name, site].split())


def test_albert_has_one_site_for_all_its_layers_and_its_unused_dropout_is_none():
    model = make("albert", num_hidden_layers=5)
    group = "encoder.albert_layer_groups.0.albert_layers.0."
    sites = {s.name: s for s in dropout_sites(model)}
    assert sites[group + "attention_probs"].calls == sites[group + "attention_output"].calls == 5
    assert {t.split(".")[-2] for t in sites[group + "attention_output"].tensors} == {"dense", "LayerNorm"}
    assert isinstance(model.get_submodule("albert." + group + "dropout"), nn.Dropout)  # it exists, and is never called
    with pytest.raises(ValueError, match="no sites of this model"):
        set_dropout(model, {group + "ffn_output": 0.2}, partial=True)


def test_looking_leaves_no_trace():
    model = make("modernbert")
    model.layer_mode = model.model.layers[0].eval()
    before = {n: (m.training, type(m)) for n, m in model.named_modules()}
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    want = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    dropout_sites(model)
    assert torch.equal(torch.rand(3), want[0]) and random.random() == want[1] and np.random.rand() == want[2]
    assert {n: (m.training, type(m)) for n, m in model.named_modules()} == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and model.config.to_dict() == config
    assert all(p.grad is None for p in model.parameters())


def test_plain_torch_modules_with_a_batch():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    sites = dropout_sites(model, batch=torch.randn(2, 5, 16))
    assert [s.kind for s in sites] == ["attention_probs", "attention_output", "ffn_inner", "ffn_output"] * 2
    with set_dropout(model, {s.name: 0.0 for s in sites}, batch=torch.randn(2, 5, 16)):
        x = torch.randn(1, 5, 16)
        assert torch.equal(model.train()(x), model(x))
    with pytest.raises(ValueError, match="batch: none given"):
        dropout_sites(model)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.map = 0.1, nn.Linear(8, 8)

        def forward(self, x):
            rate = self.drop * self.training
            return F.scaled_dot_product_attention(query=x, key=self.map(x), value=x, dropout_p=rate)

    assert [s.p for s in dropout_sites(Attention(), batch=torch.randn(2, 5, 8))] == [0.1]


def test_a_wrapped_model_is_looked_into():
    model = make()
    compiled = torch.compile(model, backend="eager")
    for wrapped in (nn.DataParallel(model), nn.DataParallel(compiled), torch.compile(nn.DataParallel(model))):
        assert dropout_sites(wrapped) == dropout_sites(model)


def test_models_that_ask_for_more_than_a_text():
    size = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    choice = transformers.BertForMultipleChoice(transformers.BertConfig(**size))
    assert rates(choice).keys() == {s.name for s in dropout_sites(make()) if "layer.1" not in s.name}
    size = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    size |= dict(vocab_size=50, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32)
    two_parts = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**size))
    names = [s.name for s in dropout_sites(two_parts)]
    assert all(any(name.startswith(part) for name in names) for part in ("encoder.", "decoder."))


def test_a_rate_may_be_a_number_of_numpy():
    found = rates(make("modernbert", attention_dropout=np.float64(0.25)))
    assert found["layers.0.attention_probs"] == 0.25


def opaque(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    "An attention kernel that PyTorch's dropout functions know nothing of."
    probs = torch.softmax(query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5), -1)
    return (probs * (torch.rand_like(probs) >= dropout) / (1 - dropout) @ value).transpose(1, 2).contiguous(), None


def deaf(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
    "One that takes a rate and does not use it."
    return opaque(module, query, key, value, attention_mask, 0.0, scaling)


def with_kernel(name, kernel):
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(kernel.__name__ + "_for_test", kernel)
    AttentionMaskInterface.register(kernel.__name__ + "_for_test", eager_mask)
    if name == "bert" and transformers.__version__ < "5":
        pytest.skip("BERT takes other attention functions from transformers 5 on")
    return make(name, kernel.__name__ + "_for_test").train()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_attention_kernels_are_seen_at_the_table_and_in_the_output(name):
    model = with_kernel(name, opaque)
    table = dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
    bare = lambda m: [(s.name, s.kind, s.tensors, s.calls) for s in dropout_sites(m)]
    assert bare(model) == bare(make(name))
    names = list(rates(model))
    with set_dropout(model, {n: 0.0 for n in names}):
        assert torch.equal(output(model), output(model))
    with set_dropout(model, {n: 0.3 * ("probs" in n) for n in names}):
        assert not torch.equal(output(model), output(model))
    with pytest.raises(ValueError, match="inside a kernel"):
        gaussian_dropout(model)
    assert dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS) == table


def test_a_kernel_that_ignores_its_rate_is_an_error():
    model = with_kernel("gpt2", deaf)
    before = rates(model)
    message = "h.0.attention_probs.*p=0.2 was set, no dropout was applied.*eager"
    with pytest.raises(RuntimeError, match=message):
        set_dropout(model, {n: 0.2 for n in before})
    assert rates(model) == before


def test_a_rate_out_of_reach_is_named_with_its_remedy():
    class Kept(nn.Module):
        p = 0.1

        def forward(self, x):
            return F.dropout(x, self.p, self.training)

    with pytest.raises(ValueError, match="no dropout site; .*p=0.1 in the model; keep each in an nn.Dropout"):
        dropout_sites(Kept(), batch=torch.ones(2, 3))
    with pytest.raises(ValueError, match="Linear has no dropout site$"):
        dropout_sites(nn.Linear(3, 3), batch=torch.ones(2, 3))


def test_preceding_grouping_takes_every_tensor_in_the_order_of_execution():
    model = make()
    groups = {s.name: set(s.tensors) for s in dropout_sites(model, "preceding")}
    both = lambda *modules: {f"encoder.layer.1.{m}.{k}" for m in modules for k in ("weight", "bias")}
    ffn = both("attention.output.LayerNorm", "intermediate.dense", "output.dense")
    assert groups["encoder.layer.1.attention_output"] == both("attention.output.dense")
    assert groups["encoder.layer.1.ffn_output"] == ffn
