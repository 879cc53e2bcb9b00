"""Who holds which bytes of a device when an engine has started: the question, its charges, and the subtraction."""
