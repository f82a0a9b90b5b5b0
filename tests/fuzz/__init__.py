"""Bad input for every door. What is tried lies in text files beside this one: `values.txt` meets
each line of `targets.txt`; `commands.txt` are command lines; and files of all kinds are damaged by
`damage.py`. A real server meets the same values in the fields of `fields.txt`, and the requests of
`requests.txt`. `python -m tests.fuzz --minutes 60` goes on by chance for as long.

The one rule: an error of ours, or success where it is allowed; no other exception, no signal, and
no call that takes longer than five seconds.
"""
