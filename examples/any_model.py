"""What the whole package does on a tiny random model, without any download: useful in tests of your
own."""

from selfspec import LLM
from selfspec.testing import tiny_model, tiny_tokenizer

model = tiny_model("qwen3")  # a transformers model, as from AutoModelForCausalLM.from_pretrained
llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
plain = llm.generate(["once upon a time", "the"], max_new_tokens=24, draft=None)
drafted = llm.generate(
    ["once upon a time", "the"], max_new_tokens=24, draft="early-exit", draft_options={"layer": 2}
)
for ours, theirs in zip(drafted, plain, strict=True):
    print(ours.tokens == theirs.tokens, ours.tokens)
print(f"acceptance {drafted[0].stats.acceptance:.2f}: a random model's early layers know little")
