"""Small transformers, their batches, and the rows of a reference as the released code takes them."""

import torch
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertModel
from transformers import T5Config, T5ForConditionalGeneration

CONFIG = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
CONFIG |= dict(max_position_embeddings=16)


def model_and_batches(n=6):
    torch.manual_seed(0)
    model, g, batches = BertModel(BertConfig(**CONFIG), add_pooling_layer=False), torch.Generator().manual_seed(1), []
    for _ in range(n):
        mask = torch.arange(10) < torch.randint(3, 11, (4, 1), generator=g)
        ids = torch.randint(0, 60, (4, 10), generator=g)
        batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": torch.zeros(4)})
    return model, batches


def of_two_stacks(kind):
    torch.manual_seed(0)
    if kind == "t5":
        sizes = dict(d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0)
        return T5ForConditionalGeneration(T5Config(vocab_size=60, d_model=16, **sizes))
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
    sizes = dict(d_model=16, encoder_layers=2, decoder_layers=1, max_position_embeddings=16, dropout=0.0)
    return BartForConditionalGeneration(BartConfig(vocab_size=60, **sizes, **heads))


def as_released(model, batches, max_points, layer=None):
    """The rows that the released code takes: those of whole batches, padding among them, until there are more than
    max_points."""
    rows, seen = [], 0
    with torch.no_grad():
        for b in batches:
            states = model.eval()(b["input_ids"], b["attention_mask"], output_hidden_states=True).hidden_states
            rows += [h.flatten(0, 1).double() for h in (states[1:] if layer is None else [states[layer]])]
            seen += sum(map(len, rows)) - seen
            if seen > max_points:
                break
    return torch.cat(rows)
