"""TRL's trainer over accelerated layers: the losses of bitsandbytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.models import bitsandbytes as layers

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")


def tokenizer() -> Any:
    """Of bytes that are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = Tokenizer(models.WordLevel({str(i): i for i in range(256)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token="0", eos_token="1")


@pytest.mark.parametrize("ours", [False, True], ids=["adapter by TRL", "adapter before"])
def test_losses_are_those_of_bitsandbytes(load: Any, prompts: Tensor, tmp_path: Path, ours: bool) -> None:
    """With a `peft_config` for TRL to apply, and with a model that has its adapter already."""
    rows = [{"input_ids": row, "labels": row} for row in prompts[:4].tolist()]  # all in every step, so the loss falls
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    def losses(accelerated: bool) -> list[float]:
        torch.manual_seed(0)
        model = load()
        if ours:
            model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), lora)
        if accelerated:
            hb.accelerate(model)
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
            report_to=[], save_strategy="no", bf16=True, use_cpu=not torch.cuda.is_available(), seed=0,
            dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, max_length=24,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
            peft_config=None if ours else lora,
        )  # fmt: skip
        if accelerated and not ours:
            hb.accelerate(trainer.model)  # TRL has added the adapter
        trainer.train()
        assert accelerated == any(layers.is_applied(module) for module in trainer.model.modules())
        hb.restore(trainer.model)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    theirs, found = losses(False), losses(True)
    assert len(theirs) == 6
    assert found == pytest.approx(theirs, rel=2e-2)
    assert found[-1] < found[0]
