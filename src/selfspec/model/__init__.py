"""The only room that knows transformers' insides: where a model comes from, how its parts are
named, how its blocks run."""
