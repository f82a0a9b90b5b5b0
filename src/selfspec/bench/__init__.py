"""The benchmark: interleaved timing, peers in processes of their own, one JSON per run, and tables
made from that JSON alone."""
