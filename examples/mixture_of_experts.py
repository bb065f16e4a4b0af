"""A mixture of experts: a small Mixtral on the Python manual, eight experts in each layer, two for each character.

    python examples/mixture_of_experts.py --plan expert=2

Its router is kept from favouring a few experts by a loss over the whole batch, under every plan.
"""

import argparse

import torch
import transformers
from torch import Tensor

import meshfit

EXPERTS, ROW = 8, 128


def rows() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The manual that ships with Python, in rows of 128 characters: nine tenths, and the last one for validation."""
    from pydoc_data.topics import topics

    text = torch.tensor([min(ord(letter), 127) for letter in "\n".join(topics.values())])
    cut = text[: len(text) // ROW * ROW].view(-1, ROW)
    first = len(cut) * 9 // 10
    return {"input_ids": cut[:first], "labels": cut[:first]}, {"input_ids": cut[first:], "labels": cut[first:]}


def network() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=EXPERTS, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.02, max_position_embeddings=ROW, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def right(outputs, labels: Tensor) -> Tensor:
    """Of each row, the share of characters that were foretold."""
    return (outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean(1)


def train(plan: str = "data=2", devices: str = "cpu", **more) -> meshfit.Result:
    text, valid = rows()
    return meshfit.fit(
        network,
        text,
        optimizer=lambda params: torch.optim.AdamW(params, lr=4e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps),
        clip=1.0,
        batch_size=16,
        epochs=2,
        valid=valid,
        valid_every=100,
        metrics={"right": right},
        plan=plan,
        devices=devices,
        **more,
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--plan", default="data=2")
    arguments.add_argument("--devices", default="cpu")
    result = train(**vars(arguments.parse_args()))
    print("characters foretold:", *(f"{step.valid['right']:.1%}" for step in result.history if step.valid))
    routers = result.model.cpu()(rows()[1]["input_ids"][:64]).router_logits
    for layer, logits in enumerate(routers):
        chosen = logits.topk(2).indices.flatten().bincount(minlength=EXPERTS) / logits.shape[0]
        print(f"layer {layer}: of all characters each expert reads", *(f"{share:.0%}" for share in chosen.tolist()))
