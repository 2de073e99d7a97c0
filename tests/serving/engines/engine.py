"""One vLLM engine in a process of its own: python engine.py JOB.json RESULT.json

A job has the arguments of vllm.LLM, prompts as token ids, and `steps`, done one after the other: "tokens" generates
greedily, "lora" does so with the adapter at `adapter`, "reload" has vLLM load the checkpoint again, and "layers" counts
those that compute several modules at once. These are let to on any device if the job `fuses`. The result has what each
step gave.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def fused_layers(model: Any) -> int:
    wholes = [getattr(module, "halfbyte", None) for module in model.modules()]
    return sum(whole.on for whole in wholes if whole is not None)


def main(job: dict[str, Any]) -> list[Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if job["fuses"]:
        from halfbyte.serving.vllm import layers

        layers.suits = lambda device: True
    llm = LLM(**job["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=1)

    def tokens(lora: Any) -> list[dict[str, Any]]:
        outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)]
        return [
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
                ],
            }
            for output in outputs
        ]

    found: list[Any] = []
    for step in job["steps"]:
        if step == "reload":
            llm.collective_rpc("reload_weights")
            found.append(None)
        elif step == "layers":
            found += llm.apply_model(fused_layers)
        else:
            lora = LoRARequest("adapter", 1, job["adapter"]) if step == "lora" else None
            found.append(tokens(lora))
    return found


if __name__ == "__main__":  # vLLM's own processes import this file
    found = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
