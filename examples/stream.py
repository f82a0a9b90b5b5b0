"""Two streams of one model, interleaved: each has a cache of its own."""

from selfspec import LLM, SamplingParams

llm = LLM.from_pretrained("demo")
sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
left = llm.stream("The sea was calm and", sampling=sampling, max_new_tokens=24)
right = llm.stream("The mountain was steep and", sampling=sampling, max_new_tokens=24)
for a, b in zip(left, right, strict=False):
    print(f"{a.text!r:20} | {b.text!r}")
