"""transformers' loops over tokens, on a kept cache, and in a captured step where that can be.

Taken are the calls whose cache `generate` made for our asking (`mark`). Greedy search and sampling run in the captured
loop (loop.py) if it knows the logits processors, the stopping criteria and the outputs of the call, and so does greedy
search with guesses from the text itself (guessing.py). Otherwise transformers' own loop runs, with a graph for its step
(graphs.py), as it always does for beam search and an assistant's guesses (driven.py). Either way the cache is one that
is kept (steps.py), and the results are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from halfbyte.models import guessing
from halfbyte.models.caches import grow
from halfbyte.models.captured import current
from halfbyte.models.driven import StandIn, attends_to_all, room
from halfbyte.models.loop import AHEAD, Kind, TokenBuffers, TokenStep, choose, run
from halfbyte.models.preparation import INPUTS, KNOWN, is_known, is_plain, is_theirs
from halfbyte.models.rotation import Rotation, mask_names
from halfbyte.models.rules import Rule, rules_of
from halfbyte.models.steps import Bucket, StepPool, pool_of

OURS = "_halfbyte_ours"  # attribute of a function: transformers' own
TOKENS = "_halfbyte_tokens"  # attribute of a cache that `generate` made for our asking: how many it must hold
LOOPS = {"generation_config", "stopping_criteria", "logits_processor", "synced_gpus", "streamer"}  # of its loops
GUESSES = {"assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor"}  # of the one that speculates
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def mark(cache: Any, tokens: int) -> None:
    """Say of a cache, empty and made to hold so many tokens, that the loop over tokens may take another one."""
    setattr(cache, TOKENS, tokens)


def apply(mixin: Any) -> None:
    """Let a class of transformers that has its loops use ours."""
    for name, ours in OURS_OF.items():
        theirs = getattr(mixin, name)
        if not hasattr(theirs, OURS):
            setattr(mixin, name, _around(theirs, ours))


def _around(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A loop of transformers where a call is not for us. ours: of the model, its pool, theirs, and the arguments."""

    @wraps(theirs)
    def loop(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        pool, cache = pool_of(self), kwargs.get("past_key_values")
        if pool is None or args or not hasattr(cache, TOKENS):
            return theirs(self, input_ids, *args, **kwargs)
        if input_ids.dim() == 2:
            texts, tokens = input_ids.shape
            pool.ahead.begin(self, texts, tokens, ours is _guessing)
        return ours(self, pool, theirs, input_ids, kwargs)

    setattr(loop, OURS, theirs)
    return loop


def undo(mixin: Any) -> None:
    for name in OURS_OF:
        theirs = getattr(getattr(mixin, name), OURS, None)
        if theirs is not None:
            setattr(mixin, name, theirs)


def _guessing(model: Any, pool: StepPool, theirs: Callable[..., Any], input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """`_assisted_decoding`, whose loop is in the captured step where guesses come from the text itself."""
    from transformers import StaticCache

    config = kwargs["generation_config"]
    others = {name: value for name, value in kwargs.items() if name not in GUESSES}
    if (
        config.prompt_lookup_num_tokens is None
        or kwargs.get("assistant_model") is not None
        or config.do_sample
        or config.return_dict_in_generate
        or len(input_ids) > 1
        or not attends_to_all(model)
        or _rules(model, input_ids, others) != []
    ):
        return _driven(model, pool, theirs, input_ids, kwargs)
    with pool.lease(model, StaticCache, 1, room(config.max_length)) as bucket:
        if bucket is None:
            return theirs(model, input_ids, **kwargs)
        others["past_key_values"] = bucket.store.begin(1)
        return _GuessingCall(model, pool, bucket, [], input_ids, None, others).run()


def _driven(model: Any, pool: StepPool, theirs: Callable[..., Any], input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """`_assisted_decoding` or `_beam_search`, whose steps are captured."""
    from transformers import StaticCache

    config, asked = kwargs["generation_config"], kwargs["past_key_values"]
    if (
        not set(kwargs) - LOOPS - GUESSES <= INPUTS
        or not _is_simple(model, input_ids, kwargs)
        or not attends_to_all(model)
    ):
        return theirs(model, input_ids, **kwargs)
    with pool.lease(model, StaticCache, len(input_ids), room(config.max_length)) as bucket:
        if bucket is None:
            return theirs(model, input_ids, **kwargs)
        stand_in = StandIn(model, pool, bucket, len(input_ids))
        kwargs["past_key_values"] = stand_in.cache
        try:
            with current(input_ids.device):
                outputs = theirs(stand_in, input_ids, **kwargs)
            if config.return_dict_in_generate:
                outputs.past_key_values = stand_in.copy_to(asked)
            return outputs
        finally:
            stand_in.close()


def _on_kept_cache(
    model: Any, pool: StepPool, theirs: Callable[..., Any], input_ids: Tensor, kwargs: dict[str, Any]
) -> Any:
    """`_sample`. theirs: transformers' own. kwargs: what it is called with."""
    asked = kwargs["past_key_values"]
    config = kwargs["generation_config"]
    tokens = max(getattr(asked, TOKENS), input_ids.shape[1])
    with pool.lease(model, type(asked), len(input_ids), tokens) as bucket:
        if bucket is None:
            return theirs(model, input_ids, **kwargs)
        cache = kwargs["past_key_values"] = bucket.store.begin(len(input_ids))
        rules = _rules(model, input_ids, kwargs)
        if rules is None:
            outputs = theirs(model, input_ids, **kwargs)
            if config.return_dict_in_generate:
                bucket.store.copy_to(asked, len(input_ids), int(cache.get_seq_length()))
                outputs.past_key_values = asked
            return outputs
        return _Call(model, pool, bucket, rules, input_ids, asked, kwargs).run()


def _rules(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> list[Rule] | None:
    """The logits processors for a captured loop; None where transformers' own loop must run."""
    config, criteria = kwargs["generation_config"], kwargs["stopping_criteria"]
    if (
        not set(kwargs) - LOOPS <= INPUTS | (KNOWN[type(model).__name__] if is_known(model) else set())
        or not _is_simple(model, input_ids, kwargs)
        or any(type(c).__name__ not in CRITERIA or not is_theirs(type(c)) for c in criteria)
        or not isinstance(kwargs.get("logits_to_keep", 0), int)
        or criteria.max_length is None
        or criteria.max_length > config.max_length
    ):
        return None
    return rules_of(kwargs["logits_processor"])


def _is_simple(model: Any, input_ids: Tensor, kwargs: dict[str, Any]) -> bool:
    """True where a captured step can have all inputs of the model and gives all outputs that the caller wants."""
    config, positions = kwargs["generation_config"], kwargs.get("position_ids")
    return (
        not kwargs.get("synced_gpus")
        and not config.output_attentions
        and not config.output_hidden_states
        and positions is not None
        and positions.dim() == 2
        and input_ids.device == model.device
        and input_ids.dim() == 2
        and input_ids.numel() > 0
        and is_plain(model)
    )


OURS_OF = {"_sample": _on_kept_cache, "_assisted_decoding": _guessing, "_beam_search": _driven}  # by transformers' loop


class _Call:
    """One call of `generate` in a captured loop."""

    def __init__(
        self,
        model: Any,
        pool: StepPool,
        bucket: Bucket,
        rules: list[Rule],
        input_ids: Tensor,
        asked: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self.model, self.pool, self.bucket, self.rules = model, pool, bucket, rules
        self.ids, self.asked = input_ids, asked
        self.config = kwargs.pop("generation_config")
        self.processor, self.criteria = kwargs.pop("logits_processor"), kwargs.pop("stopping_criteria")
        self.streamer = kwargs.pop("streamer", None)
        kwargs.pop("synced_gpus", None)
        self.inputs = kwargs
        wants = self.config.return_dict_in_generate
        self.kind = Kind(
            samples=bool(self.config.do_sample),
            ends=tuple(t for c in self.criteria if hasattr(c, "eos_token_id") for t in c.eos_token_id.tolist()),
            logits=bool(wants and self.config.output_logits),
            scores=bool(wants and self.config.output_scores),
            extras=tuple((name, kwargs[name]) for name in ("logits_to_keep",) if name in kwargs),
        )
        # Before the prompt is launched: some ask the GPU for what their processor keeps there.
        self.rule_keys = tuple((type(rule.processor).__name__, rule.key) for rule in rules)
        self.kept: dict[str, list[Tensor]] = {"logits": [], "scores": []}

    def run(self) -> Any:
        with current(self.ids.device):
            return self._run()

    def _run(self) -> Any:
        texts, prompt = self.ids.shape
        step = self._first_token()
        shift = step.rotation.begin(prompt)
        # A window forgets its oldest token with every step, so none may be made too many if it is handed out.
        loses = self.config.return_dict_in_generate and step.rotation.slides_any
        most = max(1, self.criteria.max_length - prompt)
        # With experts transformers walks through the model, here and back, for what a graph has long been made with.
        with nullcontext() if step.is_graph else self.model._optimize_model_for_decode():
            made = run(step, most, texts, 0 if loses else AHEAD, self.streamer, lambda: self._keep(step.outputs))
        if self.streamer is not None:
            self.streamer.end()
        sequences = step.buffers.ids[:texts, : prompt + made].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        self.bucket.store.copy_to(self.asked, texts, prompt + made - 1, shift)
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.kept["scores"][:made]) if self.kind.scores else None,
            logits=tuple(self.kept["logits"][:made]) if self.kind.logits else None,
            past_key_values=self.asked,
        )

    def _first_token(self) -> Any:
        """The prompt, and its token as transformers computes it; the step that makes the others."""
        outputs = self.model._prefill(
            self.ids, self.config, self.inputs, is_first_iteration=not self.config.is_assistant
        )
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        del outputs
        cache = self.inputs["past_key_values"]
        self.pool.retried(lambda: grow(cache))
        scores = self.processor(self.ids, logits)
        self._keep({"logits": logits, "scores": scores})
        step = self._step(scores.shape[-1])
        pad = self.config._pad_token_tensor
        step.buffers.begin(
            self.ids, self.inputs.get("attention_mask"), self.inputs["position_ids"], 0 if pad is None else pad
        )
        step.begin(self.rules)
        beyond = len(step.buffers.ids) - len(self.ids)
        tokens, broken = choose(scores, self.kind.samples)
        tokens = torch.nn.functional.pad(tokens, (0, beyond))
        broken = None if broken is None else torch.nn.functional.pad(broken, (0, beyond))
        step.buffers.put(tokens, broken, step.ends)
        return step

    def _buffers(self) -> TokenBuffers:
        bucket, store = self.bucket, self.bucket.store
        if bucket.buffers is None:
            bucket.buffers = TokenBuffers(store.rows, store.tokens, self.ids.device)
        return bucket.buffers

    def _step(self, vocabulary: int) -> Any:
        bucket, store, buffers = self.bucket, self.bucket.store, self._buffers()
        if bucket.rotation is None:
            names = mask_names(store.config)
            assert names is not None
            floats = self.model.dtype if store.config._attn_implementation == "eager" else None
            bucket.rotation = Rotation(store, names, floats, self.ids.device)
        rotation = bucket.rotation
        key = (self.kind, vocabulary, self.rule_keys)
        return bucket.loop(
            key,
            lambda: TokenStep(self.model, rotation, buffers, self.rules, self.kind, vocabulary, self.pool.retried),
        )

    def _keep(self, outputs: dict[str, Tensor]) -> None:
        texts = len(self.ids)
        if self.kind.logits:
            self.kept["logits"].append(outputs["logits"][:texts].clone())
        if self.kind.scores:
            self.kept["scores"].append(outputs["scores"][:texts].clone())


class _GuessingCall(_Call):
    """The same for one text, with guesses that are looked up in it."""

    def _run(self) -> Any:
        prompt = self.ids.shape[1]
        most = max(1, self.criteria.max_length - prompt)
        step = self._first_token()
        step.start(most)
        with self.model._optimize_model_for_decode():
            made = step.run(most, self.streamer)
        if self.streamer is not None:
            self.streamer.end()
        return step.buffers.ids[:1, : prompt + made].clone()

    def _step(self, vocabulary: int) -> Any:
        bucket, buffers, ends = self.bucket, self._buffers(), self.kind.ends
        ngram = self.config.max_matching_ngram_size or guessing.NGRAM
        return bucket.loop(
            (guessing.Guessing, ends, ngram),
            lambda: guessing.Guessing(self.model, bucket.store, buffers, ends, ngram, self.pool.retried),
        )
