"""The store of HGMS: folders with a manifest, and the digests, writes and leases that they use.

Everything that is written and read back uses this package: a write leaves the old bytes or the new
bytes, reading follows no link and detects changed bytes, and one process at a time works on a
folder.
"""

from hgms.store.digests import Digest as Digest
from hgms.store.digests import cache_folder as cache_folder
from hgms.store.digests import digest as digest
from hgms.store.digests import file_digest as file_digest
from hgms.store.digests import json_digest as json_digest
from hgms.store.digests import short_number as short_number
from hgms.store.files import ROWS as ROWS
from hgms.store.files import SMALL as SMALL
from hgms.store.files import DiskError as DiskError
from hgms.store.files import append as append
from hgms.store.files import as_json as as_json
from hgms.store.files import as_object as as_object
from hgms.store.files import contents as contents
from hgms.store.files import damaged_file as damaged_file
from hgms.store.files import describe_error as describe_error
from hgms.store.files import finite as finite
from hgms.store.files import flush as flush
from hgms.store.files import json_object as json_object
from hgms.store.files import open_file as open_file
from hgms.store.files import read_file as read_file
from hgms.store.files import remedy as remedy
from hgms.store.files import replace_file as replace_file
from hgms.store.files import writing as writing
from hgms.store.folder import MANIFEST as MANIFEST
from hgms.store.folder import FileRecord as FileRecord
from hgms.store.folder import Folder as Folder
from hgms.store.folder import Manifest as Manifest
from hgms.store.folder import read_manifest as read_manifest
from hgms.store.lease import LEASE as LEASE
from hgms.store.lease import FolderInUse as FolderInUse
from hgms.store.lease import HeldFolders as HeldFolders
from hgms.store.lease import Lease as Lease
from hgms.store.lease import hold_lease as hold_lease
from hgms.store.lease import holder as holder
from hgms.store.lease import is_marker as is_marker
from hgms.store.saved import DIGITS as DIGITS
from hgms.store.saved import SavedFile as SavedFile
