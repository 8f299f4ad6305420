"""Families of models that behave in ways of their own, each against what the model itself computes."""

import peft
import pytest
import torch
import transformers as T

from isoreg.fisher import empirical_fisher
from isoreg.istar import measure_isotropy
from isoreg.dropout import apply_dropout
from isoreg.sites import dropout_sites

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


def test_layers_of_speech_models_are_all_found_at_their_layer_drop():
    make = lambda drop: T.Wav2Vec2Model(T.Wav2Vec2Config(**SOUND, layerdrop=drop))
    all_of = [s.name for s in dropout_sites(make(0.0), batch=sounds())]
    model = make(0.9)
    for seed in range(3):
        torch.manual_seed(seed)
        assert [s.name for s in dropout_sites(model, batch=sounds())] == all_of
    assert model.config.layerdrop == 0.9


@pytest.mark.parametrize("kind", ["Dinov2", "Swin"])
def test_stochastic_depth_is_no_dropout(kind):
    sizes = SIZE if kind != "Swin" else dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
    config = getattr(T, f"{kind}Config")(**sizes, image_size=16, patch_size=4, drop_path_rate=0.2)
    model, batch = getattr(T, f"{kind}Model")(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
    depth = lambda: [m.drop_prob for m in model.modules() if "DropPath" in type(m).__name__]
    before, sites = depth(), dropout_sites(model, batch=batch)
    assert sites and not any("drop_path" in s.handle for s in sites)
    apply_dropout(model, "constant", p=0.3, batch=batch)
    assert depth() == before and max(before) > 0


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_states_without_a_learned_prompt_are_refused(kind):
    model = T.BertForSequenceClassification(T.BertConfig(**TEXT))
    model = peft.get_peft_model(model, kind(task_type="SEQ_CLS", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="model: its learned prompt"):
        measure_isotropy(model, [texts()])
