"""Plain and self-speculative generation of one answer: the same tokens, fewer passes of the
model."""

from selfspec import LLM

llm = LLM.from_pretrained("demo")  # or a folder, a hub name, a live transformers model
question = [
    {"role": "user", "content": "List the days of the week, then list them again in reverse order."}
]

plain = llm.chat(question, max_new_tokens=80, draft=None)
drafted = llm.chat(
    question, max_new_tokens=80, draft="hybrid", control="fixed", control_options={"tokens": 5}
)

print(drafted.text)
print("the same tokens:", drafted.tokens == plain.tokens)
for name, result in (("plain", plain), ("drafted", drafted)):
    stats = result.stats
    print(
        f"{name:8} {stats.verifications} passes, {stats.decode_tokens_per_second:.0f} tokens/s, "
        f"acceptance {stats.acceptance:.2f}"
    )
