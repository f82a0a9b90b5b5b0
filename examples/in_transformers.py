"""Self-speculation inside a transformers model's own `generate`: the same greedy tokens, and the
model stays as it was."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import selfspec
from selfspec.model.load.demo import demo_folder

folder = demo_folder()  # or the name of your model
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs = tokenizer(
    "The days of the week are Monday, Tuesday, Wednesday, Thursday,", return_tensors="pt"
)

decoding = selfspec.transformers("hybrid", control="fixed", control_options={"tokens": 5})
streamer = TextStreamer(tokenizer, skip_prompt=True)
drafted = model.generate(
    **inputs, max_new_tokens=32, do_sample=False, custom_generate=decoding, streamer=streamer
)

plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print("the same tokens:", torch.equal(drafted, plain))
assert decoding.stats is not None
print(
    f"{decoding.stats.tokens_per_verification:.2f} tokens a pass, acceptance "
    f"{decoding.stats.acceptance:.2f}"
)
