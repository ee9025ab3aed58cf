def pytest_addoption(parser):
    parser.addoption(
        "--fuzz-seed", type=int, default=None, help="test_fuzz.py: replay this one trace"
    )
