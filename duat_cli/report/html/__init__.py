"""Reports as HTML pages: pure functions from result models to markup, which compute and fetch nothing."""
