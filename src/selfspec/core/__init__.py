"""What every room shares: plain values, options, random numbers, sampling, text. Knows no model."""
