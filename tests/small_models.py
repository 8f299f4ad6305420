"""Small transformers of many families and their dropout sites by kind, for tests of sites, schedules and noise."""

import random

import pytest
import torch
import transformers

from isoreg.sites import dropout_sites

SIZES = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
BERT = SIZES | dict(intermediate_size=32)
BOTH = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
DISTIL = dict(vocab_size=99, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32)
GPT2 = dict(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
T5 = dict(vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
MODERN = BERT | SPECIAL | dict(attention_dropout=0.1, mlp_dropout=0.1, embedding_dropout=0.1)
DEBERTA = BERT | dict(relative_attention=True, pos_att_type=["p2c", "c2p"])
LLAMA = BERT | dict(num_key_value_heads=1, attention_dropout=0.1)

CLASSES = "ForSequenceClassification"
IN_LAYERS = dict(embedding=1, attention_probs=2, attention_output=2, ffn_output=2)
USUAL = IN_LAYERS | dict(classifier=1)
ALBERT_KINDS = dict(embedding=1, attention_probs=1, attention_output=1, classifier=1)
MODERN_KINDS = dict(embedding=1, attention_probs=2, attention_output=2, ffn_inner=2, classifier=1)
T5_KINDS = dict(embedding=2, attention_probs=3, attention_output=3, ffn_inner=2, ffn_output=2)
SMALL = {  # name: (config class, model class, settings, attention implementations, Counter of kinds)
    "bert": ("Bert", CLASSES, BERT, 2, USUAL),
    "roberta": ("Roberta", CLASSES, BERT, 2, USUAL),
    "albert": ("Albert", CLASSES, BERT | BOTH | dict(embedding_size=8), 2, ALBERT_KINDS),
    "electra": ("Electra", CLASSES, BERT | dict(embedding_size=8), 2, USUAL),
    "distilbert": ("DistilBert", CLASSES, DISTIL, 2, dict(embedding=1, attention_probs=2, ffn_output=2, classifier=1)),
    "gpt2": ("GPT2", "LMHeadModel", GPT2, 2, IN_LAYERS),
    "t5": ("T5", "ForConditionalGeneration", T5, 2, T5_KINDS),
    "modernbert": ("ModernBert", CLASSES, MODERN, 2, MODERN_KINDS),
    "mpnet": ("MPNet", CLASSES, BERT, 1, USUAL),
    "deberta": ("DebertaV2", CLASSES, DEBERTA, 1, USUAL | dict(other=2, classifier=2)),
    "llama": ("Llama", "ForCausalLM", LLAMA, 2, dict(attention_probs=2)),
}


def make(name="bert", attention="eager", head=None, **settings):
    family, default, config, _, _ = SMALL[name]
    torch.manual_seed(0)
    extra = {} if SMALL[name][3] == 1 else {"attn_implementation": attention}
    try:
        return getattr(transformers, family + (default if head is None else head))(
            getattr(transformers, family + "Config")(**config | settings, **extra)
        )
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            pytest.skip(f"{name} has no SDPA in transformers {transformers.__version__}")
        raise


IDS = torch.arange(5, 17)[None]


@torch.no_grad()
def output(model, ids=IDS):
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **extra)[0]


def rates(model, **options):
    return {s.name: s.p for s in dropout_sites(model, **options)}


def scores_of(model, seed=0):
    draw = random.Random(seed)
    return {n: draw.random() for n, _ in model.named_parameters()}


EVERY = [(name, attention) for name in SMALL for attention in ("eager", "sdpa")[: SMALL[name][3]]]
