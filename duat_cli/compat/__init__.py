"""Every private or unstable name of other libraries that duat relies on, one file a library.

Each entry says what breaks without it. Nothing here imports its library before it is used, Typer aside: any module may
import from here without loading torch or transformers.
"""
