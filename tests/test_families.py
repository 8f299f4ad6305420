"""Families of models that behave in ways of their own, each against what the model itself computes."""

import copy

import peft
import pytest
import torch
import transformers as T
from torch import nn

from isoreg.fisher import empirical_fisher
from isoreg.istar import measure_isotropy
from isoreg.noise import apply_dropout
from isoreg.sites import dropout_sites
from isoreg.states import hidden_states

SIZE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
TEXT = SIZE | dict(vocab_size=99, max_position_embeddings=80)
SOUND = SIZE | dict(conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2)
SOUND |= dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def texts(length=12, short=8):
    ids = torch.randint(5, 99, (4, length))
    mask = torch.ones_like(ids)
    mask[0, short:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sounds():
    "Two clips, of 14 and of 39 frames."
    mask = (torch.arange(400) < torch.tensor([150, 400])[:, None]).long()
    return {"input_values": torch.randn(2, 400) * mask, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert"])
def test_scores_of_a_masked_model_guide_a_classifier(kind):
    "Whichever name of the tied embeddings comes first in the masked model."
    config = getattr(T, f"{kind}Config")(**TEXT, pad_token_id=1)
    masked = getattr(T, f"{kind}ForMaskedLM")(config)
    batch = texts()
    batch["labels"] = batch["input_ids"].masked_fill(torch.rand(4, 12) > 0.3, -100)
    estimate = empirical_fisher(masked, [batch])
    assert not any(name.startswith("lm_head.decoder.weight") for name in estimate.sums)
    done = apply_dropout(getattr(T, f"{kind}ForSequenceClassification")(config), "guided", scores=estimate)
    assert done["mean"] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM"])
def test_layers_of_speech_models_are_all_found_at_their_layer_drop(kind):
    make = lambda drop: getattr(T, f"{kind}Model")(getattr(T, f"{kind}Config")(**SOUND, layerdrop=drop))
    all_of = [s.name for s in dropout_sites(make(0.0), batch=sounds())]
    model = make(0.9)
    for seed in range(3):
        torch.manual_seed(seed)
        assert [s.name for s in dropout_sites(model, batch=sounds())] == all_of
    assert model.config.layerdrop == 0.9


@pytest.mark.parametrize("kind", ["SEW", "SEWD"])
def test_steps_of_squeezed_speech_are_counted_after_squeezing(kind):
    model = getattr(T, f"{kind}Model")(getattr(T, f"{kind}Config")(**SOUND, squeeze_factor=2)).eval()
    states, mask = hidden_states(model, sounds())
    assert mask.sum(1).tolist() == [14 // 2, 39 // 2] and states[-1].shape[1] == 39 // 2


def test_a_model_that_changes_itself_on_short_texts_stays_as_it_was():
    config = T.BigBirdConfig(**TEXT, block_size=4, num_random_blocks=1)
    model, long = T.BigBirdForMaskedLM(config).eval(), texts(64, 60)
    before, parts = model(**long).logits, list(model.modules())
    with pytest.raises(ValueError, match="batch: the model replaced parts of itself"):
        dropout_sites(model)
    assert model.bert.attention_type == "block_sparse" and list(model.modules()) == parts
    assert torch.equal(model(**long).logits, before)
    assert dropout_sites(model, batch=long)


def test_a_look_leaves_buffers_that_a_pass_replaces():
    model = T.IBertForMaskedLM(T.IBertConfig(**TEXT, pad_token_id=1, quant_mode=True))
    before, places = copy.deepcopy(model.state_dict()), [id(b) for b in model.buffers()]
    dropout_sites(model)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert [id(b) for b in model.buffers()] == places


@pytest.mark.parametrize("drop_path", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["Dinov2", "Beit", "Swin"])
def test_stochastic_depth_is_no_dropout(kind, drop_path):
    sizes = SIZE if kind != "Swin" else dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
    config = getattr(T, f"{kind}Config")(**sizes, image_size=16, patch_size=4, drop_path_rate=drop_path)
    model, batch = getattr(T, f"{kind}Model")(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
    depth = lambda: [m.drop_prob for m in model.modules() if "DropPath" in type(m).__name__]
    before, sites = depth(), dropout_sites(model, batch=batch)
    assert sites and not any("drop_path" in handle for s in sites for handle in s.handles)
    apply_dropout(model, "constant", p=0.3, batch=batch)
    assert depth() == before and (max(before, default=0) > 0) == (drop_path > 0)


def test_the_states_of_longformer_are_those_under_its_classifier():
    "Whose first token attends to all."
    settings = dict(attention_window=4, pad_token_id=1, initializer_range=0.5)
    model, batch = T.LongformerForSequenceClassification(T.LongformerConfig(**TEXT, **settings)).eval(), texts(30, 20)
    expected = model(**batch, output_hidden_states=True).hidden_states
    found, mask = hidden_states(model, batch)
    assert all(torch.allclose(a[mask.bool()], b[mask.bool()], atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("wrap", ["compiled", "adapted", "derived"])
def test_the_head_of_longformer_is_known_behind_wrappers(wrap):
    class Classifier(T.LongformerForSequenceClassification):
        "A class of another name."

    settings = dict(attention_window=4, pad_token_id=1, initializer_range=0.5)
    model, batch = Classifier(T.LongformerConfig(**TEXT, **settings)).eval(), texts(30, 20)
    expected = model(**batch, output_hidden_states=True).hidden_states[-1]
    if wrap == "compiled":
        model = torch.compile(model, backend="eager")
    if wrap == "adapted":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).eval()
    found, mask = hidden_states(model, batch)
    assert torch.allclose(found[-1][mask.bool()], expected[mask.bool()], atol=1e-5)


class Odd(nn.Module):
    "Dropout whose name is like that of layer drop, a part in TorchScript, one made while it runs, a class as config."

    config = T.BertConfig

    def __init__(self):
        super().__init__()
        self.layer_dropout, self.linear = nn.Dropout(0.1), torch.jit.script(nn.Linear(4, 4))
        self.parts = nn.ModuleDict()

    def forward(self, x):
        if "made" not in self.parts:
            self.parts["made"] = nn.Linear(4, 4)
        return self.parts["made"](self.layer_dropout(self.linear(x)))


def test_a_module_of_odd_parts_is_looked_into():
    model = Odd().eval()
    (site,) = dropout_sites(model, batch=torch.randn(2, 4))
    assert not any(m.training for m in model.modules() if m is not model.parts.made)
    assert site.handles == ("layer_dropout",) and site.p == 0.1 and model.layer_dropout.p == 0.1


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_states_without_a_learned_prompt_are_refused(kind):
    model = T.BertForSequenceClassification(T.BertConfig(**TEXT))
    model = peft.get_peft_model(model, kind(task_type="SEQ_CLS", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="model: its learned prompt stands before the body"):
        measure_isotropy(model, [texts()])


@pytest.mark.parametrize(
    "model",
    [
        T.BertLMHeadModel(T.BertConfig(**TEXT)),
        T.XLNetLMHeadModel(T.XLNetConfig(vocab_size=99, d_model=16, n_layer=2, n_head=2, d_inner=32)),
    ],
    ids=["bert", "xlnet"],
)
def test_a_causal_loss_of_a_model_that_looks_ahead_is_refused(model):
    with pytest.raises(ValueError, match="loss: 'clm', but this .* sees the tokens on the right"):
        empirical_fisher(model, [texts() | {"labels": texts()["input_ids"]}], loss="clm")


def test_a_causal_loss_of_a_decoder_is_taken():
    batch = texts(12, 12)
    estimate = empirical_fisher(
        T.BertLMHeadModel(T.BertConfig(**TEXT, is_decoder=True)), [batch | {"labels": batch["input_ids"]}]
    )
    assert estimate.loss == "clm"


def test_mixout_says_which_weights_it_does_not_mix():
    "Those of XLNet's attention are parameters of their own, in no linear map."
    config = T.XLNetConfig(vocab_size=99, d_model=16, n_layer=2, n_head=2, d_inner=32, num_labels=2)
    done = apply_dropout(T.XLNetForSequenceClassification(config), "mixout", p=0.5)
    left = {name for name in done["not_called"] if ".rel_attn." in name}
    assert {f"transformer.layer.{i}.rel_attn.{n}" for i in (0, 1) for n in "qkvor"} <= left and done["mixed"] == 4
    assert f"{len(done['not_called'])} matrices of the encoder are not mixed, see not_called" in done["notes"]
