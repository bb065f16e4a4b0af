"""Every private or version-dependent piece of torch that meshfit uses, by subject: no other file of the package reaches
for one (tests/test_torch_private.py holds that, and checks each piece). Supported: torch 2.11 to 2.13."""
