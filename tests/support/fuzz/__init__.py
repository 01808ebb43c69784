"""Requests, images and adapter directories that nobody should send, made from a seed; and what becomes of a server.

    python -m tests.support.fuzz http://127.0.0.1:30000 --requests 1000 --seed 7

``values`` holds what is put where it does not belong, ``schemas`` walks a server's OpenAPI description, ``seeds`` are
requests that make sense, ``bodies`` spoils them, ``raw`` writes what is no JSON; ``images`` and ``adapters`` spoil
files; ``calls`` makes request number n of a seed out of all these, and ``run`` sends them beside one stream whose
tokens must stay the same. ``routes`` names what is not called, and why.
"""
