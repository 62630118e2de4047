"""Reports in forms that others read: the forms of `duat check` by name, and what model repositories carry."""
