"""What only time shows: runs that are killed at random moments, and memory after thousands of
requests. Short runs are part of the suite (`tests/test_endurance.py`), long ones are made by hand:

    python -m tests.endurance kills             50 kills of each command, into benchmarks/results
    python -m tests.endurance memory            5,000 requests and 2,000 turns of chats
    python -m tests.endurance memory --model demo --requests 200 --turns 100
    python -m tests.endurance ctrl-c            2,000 interruptions of chats, streams and batches
"""
