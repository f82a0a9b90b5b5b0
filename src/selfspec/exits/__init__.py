"""Exits that differ from token to token: when may a token leave the model before its last layer?"""
