"""What all subcommands of `atoll` share: the application, options for reaching a core, contexts, and output formats.

May import: errors.
"""
