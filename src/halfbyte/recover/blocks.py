"""The first blocks of a transformers model, and one position of them for many candidates at once.

The model computes with its own modules: a copy of the decoder's shell, which shares every weight, holds the first
blocks only. What embeddings are scaled by, positions, rotary angles, experts are its own business and stay so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.recover.attention import Prefix, candidates_attention
from halfbyte.recover.graphed import Graphed
from halfbyte.recover.invariant import BatchInvariant

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
ATTENTIONS = {"full_attention", "sliding_attention"}  # kinds of layers that see a prefix as attention.py has it


class Blocks:
    """Maps candidates to their states after `layer` blocks, behind the tokens found so far.

    model: a causal LM of transformers. layer: 0 (the embeddings) to the number of blocks. normed: whether the model's
    final norm comes after. length: tokens that there will be. graphs: replay calls as CUDA graphs; what is returned
    then lives until the next call. batch_invariant: 4-bit products of candidates give a row the same bits however many
    rows there are. Raises TypeError or ValueError for models whose positions cannot be computed one by one.
    """

    def __init__(
        self, model: Any, layer: int, normed: bool, length: int, graphs: bool = False, batch_invariant: bool = False
    ) -> None:
        decoder = _decoder_of(model)
        name, blocks = _blocks_of(decoder)
        self.config = decoder.config
        self.graphs = graphs
        self.products: AbstractContextManager[Any] = nullcontext()
        if batch_invariant:
            self.products = BatchInvariant()  # type: ignore[no-untyped-call]
        self.shell = copy.copy(decoder)
        for replaced in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which would call the whole decoder
            self.shell.__dict__.pop(replaced, None)
        self.shell._modules = dict(decoder._modules)
        self.shell._modules[name] = nn.ModuleList(list(blocks)[:layer])
        if not normed:
            self.shell._modules[_norm_of(decoder)] = nn.Identity()
        embedding = model.get_input_embeddings()
        self.table: Tensor = _table_of(embedding)
        self.vocabulary = len(self.table)
        self.device = device_of(model)
        self.prefix = Prefix(length, self.device)
        self._states: Callable[..., Any] = Graphed(self._compute) if graphs else self._compute
        self._pull: Callable[..., Any] = Graphed(self._descend) if graphs else self._descend

    @torch.no_grad()
    def whole(self, tokens: Tensor) -> Tensor:
        """States [T, D] of tokens [T], as the model computes them: all at once, with its own attention."""
        result: Tensor = self.shell(input_ids=tokens[None].to(self.device), use_cache=False, return_dict=True)[0][0]
        return result

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """States [C, D] of candidate tokens [C] at the position that comes next."""
        result: Tensor = self._states(tokens)
        return result

    def pull(self, embeddings: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """How far the states of embeddings [R, E] are from `target` [D], fp32 [R], and gradients, fp32 [R, E].

        They are the gradients of half the squared distance, each divided by the residual's root mean square for the
        sake of fp16.
        """
        distances, gradients = self._pull(embeddings, target)
        return distances, gradients

    def append(self, candidate: int) -> None:
        """Take a candidate of the last call of `states`, by its place there, for the token of its position."""
        self.prefix.append(candidate)

    def reset(self) -> None:
        """Back to before the first token."""
        self.prefix.reset()

    def _compute(self, tokens: Tensor) -> Tensor:
        return self._run(input_ids=tokens[None])

    @torch.enable_grad()
    def _descend(self, embeddings: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        inputs = embeddings.detach().to(self.table.dtype)[None].requires_grad_()
        states = self._run(inputs_embeds=inputs)
        residual = states.detach().float() - target.float()
        scale = residual.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
        (gradients,) = torch.autograd.grad(states, inputs, (residual / scale).to(states.dtype))
        return torch.linalg.vector_norm(residual, dim=-1), gradients[0].float()

    def _run(self, **inputs: Tensor) -> Tensor:
        (given,) = inputs.values()
        with candidates_attention(self.config), self.products:
            result: Tensor = self.shell(
                **inputs,
                attention_mask=self.prefix.back,
                position_ids=self.prefix.position.expand(1, given.shape[1]),
                past_key_values=self.prefix,
                use_cache=True,
                return_dict=True,
            )[0][0]
        return result


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def depth_of(model: Any) -> int:
    """How many blocks a model has."""
    return len(_blocks_of(_decoder_of(model))[1])


def device_of(model: Any) -> torch.device:
    """Where a model takes tokens, and where recovery does its work."""
    embedding = model.get_input_embeddings()
    device: torch.device = next(iter([*embedding.parameters(), *embedding.buffers()])).device
    return device


def _decoder_of(model: Any) -> Any:
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise TypeError(
            f"model is a {type(model).__name__}; recovery takes a causal language model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained gives"
        )
    decoder = model.get_decoder()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder and a decoder; recovery takes decoders only")
    if not getattr(type(decoder), "_supports_attention_backend", False):
        raise ValueError(
            f"{type(decoder).__name__} does not let its attention be chosen, and candidates need one of their own; "
            "models such as Llama, Mistral, Qwen, Gemma, Phi and GPT-2 do"
        )
    kinds = set(getattr(decoder.config, "layer_types", None) or ()) - ATTENTIONS
    if kinds:
        raise ValueError(
            f"{type(decoder).__name__} has layers of kind {', '.join(sorted(kinds))}; recovery knows "
            f"{' and '.join(sorted(ATTENTIONS))}"
        )
    return decoder


def _blocks_of(decoder: Any) -> tuple[str, nn.ModuleList]:
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == decoder.config.num_hidden_layers:
            return name, module
    raise ValueError(f"{type(decoder).__name__} has no list of its blocks; recovery does not know this kind of model")


def _norm_of(decoder: Any) -> str:
    for name in NORMS:
        if isinstance(getattr(decoder, name, None), nn.Module):
            return name
    raise ValueError(f"{type(decoder).__name__} has no final norm under a known name ({', '.join(NORMS)})")


@torch.no_grad()
def _table_of(embedding: nn.Module) -> Tensor:
    """The embeddings of all tokens [V, E], as `inputs_embeds` takes them."""
    if type(embedding) is nn.Embedding:
        return embedding.weight.detach()
    count = getattr(embedding, "num_embeddings", None)
    if count is None:
        raise ValueError(f"the input embedding is a {type(embedding).__name__}; recovery needs one with a row a token")
    device = next(embedding.parameters()).device
    table: Tensor = embedding(torch.arange(count, dtype=torch.int64, device=device)).detach()  # scaled, as Gemma's are
    return table
