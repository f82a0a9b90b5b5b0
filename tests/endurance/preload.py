"""What the commands import, imported before processes are forked."""

import importlib

for name in (
    *("gguf", "peft", "transformers.models.llama.modeling_llama", "transformers.trainer"),
    *("selfspec.bench.suite_run", "selfspec.bench.tasks", "selfspec.bench.suite_report"),
    *("selfspec.train.own_text", "selfspec.train.part_run", "selfspec.train.run"),
    *("selfspec.tune.run", "optuna.samplers", "tests.endurance.commands"),
):
    importlib.import_module(name)
