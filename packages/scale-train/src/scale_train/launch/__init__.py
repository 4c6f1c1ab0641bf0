"""How ranks are started and end. Begin with `launcher`; Ctrl-C while it loads and closed streams have their files."""
