"""GPTs as strangers would write them, for the gradient oracle to judge: none knows the project."""
