"""The server: OpenAI's HTTP interface over one engine whose rows come and go."""
