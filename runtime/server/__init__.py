"""The server: a bundle's levels behind an OpenAI-compatible interface, and a page. Needs the extra `serve`.

Only `command` is imported by the rest of the runtime, and it imports the others when `serve` is called.
"""
