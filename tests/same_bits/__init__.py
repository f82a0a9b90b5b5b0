"""The record of what selfspec computes, bit for bit: ten tiny models, every drafter, every variant.

`record.json` holds digests of logits, log-probabilities and texts, made before the package was
restructured. `tests/test_same_bits.py` computes all of it again and compares. The kernels are
compiled for three fixed sets of instructions (AVX-512, AVX2, x86-64 with neither), so that the
record depends on the processor as little as it can.

    python -m tests.same_bits             compares, and says what differs
    python -m tests.same_bits avx512      compares one variant: 20 seconds
    python -m tests.same_bits --record    makes the record anew

Only a logged decision may make it anew: an entry in docs/log.md that says which output changes, and
why it may. A restructuring, a rename or a speed-up never may.

Bits depend on the processor's maker, on torch and on the compiler: their exp, their sums and their
choice of what to fuse differ. Where all three are those of the record, every digest must be equal.
Elsewhere texts must be equal, and bits that differ are a warning. To depend on little else, weights
are made from whole numbers, torch is told which instructions it may use, and there is one thread.

What was found when it was first made (Intel Xeon with AVX-512, g++ 12.2): kernels compiled with
-march=native have the digests of x86-64-v4, all of them, also with two threads and with torch left
to choose its own instructions. The three variants agree in every text and in no digest of bits.
"""
