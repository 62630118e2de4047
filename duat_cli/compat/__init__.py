"""Every private or unstable name of other libraries that duat relies on, one file for each library.

Each entry says what breaks without it. Except for Typer, no library is imported here before it is used: any module may
import from here without loading torch or transformers.
"""
